"""One forward over many rows: the runner, its KV slots and attention, and what makes them fast."""
