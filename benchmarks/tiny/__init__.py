"""The tiny bundled models, of tests and benchmarks: their corpus, tokenizer and training, and larger ones of them."""
