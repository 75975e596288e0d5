"""Contestants of a comparison: Consort, Hugging Face `generate`, vLLM, classical alternation."""
