"""Contestants in turn on the same prompts, and what follows from their records."""
