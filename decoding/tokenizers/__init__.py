"""Several tokenizers: the bytes of tokens, comparison of vocabularies, translation of texts and logits."""
