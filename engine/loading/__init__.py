"""Loading models: which are supported, whether they fit into memory, how they are split."""
