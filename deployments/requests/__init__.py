"""What clients may send: fields, and how each is checked. Knows nothing of models."""
