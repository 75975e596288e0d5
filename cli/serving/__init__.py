"""How `consort serve` and `consort pull` take a model, and what they say about it."""
