"""Trains heads that draft on a target's hidden states: EAGLE-3 and Medusa. Must not know the command line."""
