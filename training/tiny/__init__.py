"""The tiny bundled models: their corpus, tokenizer and training. Must not know drafters."""
