"""One forward over many rows: the runner, KV slots and attention, and their fast paths."""
