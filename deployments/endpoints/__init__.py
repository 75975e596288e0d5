"""Endpoints: HTTP bodies become requests to models, and requests deltas."""
