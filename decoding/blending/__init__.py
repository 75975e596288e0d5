"""Ensembles: blends of several models' logits, and their options."""
