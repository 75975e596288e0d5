"""Whether a server keeps its word: small, independent checks of any server with OpenAI's API."""
