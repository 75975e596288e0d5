"""How many replicas each model has: by load, and by hand."""
