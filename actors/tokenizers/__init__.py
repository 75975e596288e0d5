"""Mappings between the tokens of two models."""
