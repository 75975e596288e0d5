"""Loops that share a process and a GPU: each computes in a stream of its own, or they would wait for each other."""

import torch


def use_own_stream(device: torch.device) -> None:
    """From here on, what this thread launches on a GPU runs beside what other threads launch, not after it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what was loaded so far is there for this stream, too
        torch.cuda.set_stream(torch.cuda.Stream(device))
