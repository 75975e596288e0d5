"""What brings up a cluster on hosts of one's own: a node provider for Ray's cluster launcher."""
