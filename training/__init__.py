"""Training, pruning and what is measured on its results."""
