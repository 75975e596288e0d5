"""What is kept of answered requests, in memory or a database."""
