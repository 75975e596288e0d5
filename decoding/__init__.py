"""Pure decoding algorithms over tensors and token ids: no Ray, no transformers, no I/O, no global random state."""
