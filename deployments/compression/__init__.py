"""Prompt compression: what of a text to keep, by a small model's probabilities. Knows no server and no messages."""
