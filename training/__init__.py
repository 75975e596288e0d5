"""Training of the bundled models. Must not know about decoding, serving or actors."""
