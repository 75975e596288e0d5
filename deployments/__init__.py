"""The HTTP edge: configuration, OpenAI-compatible API, Serve application, commands, console and page."""
