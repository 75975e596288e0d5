"""GGUF files, as llama.cpp uses them: their architectures, tensors and tokenizers in the words of transformers."""
