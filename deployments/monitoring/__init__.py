"""Metrics and traces of the server."""
