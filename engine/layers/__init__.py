"""Layers that replace those of a loaded model, by kind: linear, norms, feed-forward, rotary positions, adapters."""
