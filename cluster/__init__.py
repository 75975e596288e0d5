"""A node provider for Ray's cluster launcher, for hosts of your own."""
