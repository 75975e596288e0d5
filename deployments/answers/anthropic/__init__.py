"""Answers in the format of Anthropic's Messages API."""
