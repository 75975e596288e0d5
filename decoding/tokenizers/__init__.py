"""Tokenizers compared: what tokens stand for, and texts across vocabularies."""
