"""Blends of several models' logits, and how an ensemble is configured."""
