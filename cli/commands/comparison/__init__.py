"""What `consort compare` finds out, and how it tells it. Knows nothing of the command line."""
