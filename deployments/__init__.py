"""The HTTP edge: configuration, OpenAI-compatible API, Serve application."""
