"""Structured output: grammars, their state along a text, token masks."""
