"""Heads on the target's hidden states that draft in its process: Medusa and EAGLE-3."""
