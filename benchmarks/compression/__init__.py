"""What prompt compression costs and gives, with a real model: retrieval, likelihood, time to the first token."""
