"""GGUF files, as llama.cpp uses them: their configurations, weights and tokenizers in transformers' form."""
