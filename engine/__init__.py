"""One forward over many rows: models and their checkpoints, KV pages, kernels, draft heads, tokenizers."""
