"""Request bodies of OpenAI's Responses API."""
