"""What crosses processes: addresses, messages, links, logits as bytes."""
