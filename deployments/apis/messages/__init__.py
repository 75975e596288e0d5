"""POST /v1/messages."""
