"""Splits the text of an answer into reasoning, content and tool calls, whole or streamed."""
