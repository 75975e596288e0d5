"""How good texts are, measured on their tokens: pure functions. Knows nothing of decoding, models or serving."""
