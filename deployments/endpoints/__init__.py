"""Endpoints: HTTP bodies become requests to models, deltas become answers. Knows no HTTP."""
