"""What a target's step costs, counted without a GPU: bytes, kernels, copies, waits, and the host's own time."""
