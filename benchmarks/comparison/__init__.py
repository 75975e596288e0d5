"""Comparison of contestants: interleaved runs on the same prompts, and the analysis of their records."""
