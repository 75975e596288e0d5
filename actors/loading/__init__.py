"""From a checkpoint to a model: what is supported, what fits into memory, how it is split."""
