"""How Consort scales: a simulator, and what it is validated with."""
