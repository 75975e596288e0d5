"""Layers for GPUs that give a token the same bits however many tokens run beside it."""
