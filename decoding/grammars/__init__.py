"""Structured output: grammars, their state along a text, and masks."""
