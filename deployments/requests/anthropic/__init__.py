"""Request bodies of Anthropic's Messages API."""
