"""Request bodies: their fields and how each is checked. Knows nothing of models."""
