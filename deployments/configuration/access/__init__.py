"""Who may ask a server: API keys, and its certificate."""
