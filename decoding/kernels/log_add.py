"""Sums of probabilities given by their logarithms, with the same bits wherever a number stands in its tensor."""

import torch
from torch import Tensor


def log_add(first: Tensor, second: Tensor) -> Tensor:
    """Return log(exp(first) + exp(second)), of their common shape. −∞: impossible.

    `torch.logaddexp` computes the last numbers of a tensor, or of a thread's part, by other functions than the rest.
    """
    larger = torch.maximum(first, second)
    total = larger + (-(first - second).abs()).exp().log1p()
    return torch.where(larger == -torch.inf, larger, total)
