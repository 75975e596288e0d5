"""State and processes: the target and drafter loops, the coordinator, and the links between them."""
