"""The text side of an endpoint: prompts become requests to models, tokens become answers. Knows no HTTP."""
