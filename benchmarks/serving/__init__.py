"""Load over HTTP, beside vLLM's server."""
