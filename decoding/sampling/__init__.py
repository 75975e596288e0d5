"""From logits to tokens: parameters, processors, noise, stop conditions."""
