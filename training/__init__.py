"""Trains the bundled models. Knows nothing of decoding, serving or actors."""
