"""Communication between processes: addresses, messages, links and the encoding of logits."""
