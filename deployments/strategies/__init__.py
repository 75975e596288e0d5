"""Whole answers by several models: one is chosen, by scores, votes or comparisons, or a new one is written."""
