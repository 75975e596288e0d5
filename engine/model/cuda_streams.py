"""A CUDA stream for each loop, so that loops on one GPU do not wait for each other."""

import torch


def use_own_stream(device: torch.device) -> None:
    """Let this thread's kernels run beside those of other threads."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # this stream must see the weights that were loaded
        torch.cuda.set_stream(torch.cuda.Stream(device))
