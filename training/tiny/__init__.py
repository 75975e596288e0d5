"""The tiny bundled models: their corpus, tokenizer and training."""
