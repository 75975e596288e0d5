"""Prompt compression: what of a text to keep, by a small model's probabilities or attention.

Knows no server and no messages.
"""
