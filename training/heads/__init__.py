"""Trains heads that draft on a target's hidden states: EAGLE-3 and Medusa."""
