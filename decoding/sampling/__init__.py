"""From logits to a token: parameters, processors, noise, stopping, text."""
