"""State and processes: the model runner, the target and drafter loops, the coordinator, and the links between them."""
