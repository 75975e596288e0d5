"""Mappings between the tokenizers of two models."""
