"""The HTTP edge: configuration, OpenAI's API, the Serve application, commands, console and page."""
