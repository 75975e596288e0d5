"""Answers in OpenAI's formats, whole or in chunks, with log-probabilities, ensemble members and tool calls."""
