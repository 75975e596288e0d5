"""Faults under load: every answer must be what it always is."""
