"""Tokenizers at the HTTP edge, and the formats of tool calls."""
