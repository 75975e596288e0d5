"""What clients get: answers whole or in chunks, as OpenAI's API has them, with tokens, members and calls of tools."""
