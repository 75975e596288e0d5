"""Heads on the target's hidden states that draft in its process: Medusa, EAGLE-3 and MTP."""
