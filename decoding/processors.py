"""Logits processors, vectorised over rows that have different settings.

Each function takes logits [N, V] in float32 and one setting per row, changes nothing in place, and equals
transformers' processor of the same name on every row. A setting that means "off" leaves its row as it is.
"""

import torch
from torch import Tensor

_NEG_INF = float("-inf")


def temperature(logits: Tensor, values: Tensor) -> Tensor:
    """Divide by the temperature. values: [N], 1 is off; greedy rows must come with 1."""
    return logits / values[:, None]


def top_k(logits: Tensor, values: Tensor) -> Tensor:
    """Keep the k largest logits (and ties with the k-th). values: [N] int64, 0 is off. Fan et al., arXiv 1805.04833."""
    k = values.clamp(min=1, max=logits.shape[-1])  # [N]
    largest = logits.topk(int(k.max()), dim=-1).values  # [N, max k]
    threshold = largest.gather(-1, k[:, None] - 1)  # [N, 1]
    return logits.masked_fill((logits < threshold) & (values > 0)[:, None], _NEG_INF)


def top_p(logits: Tensor, values: Tensor) -> Tensor:
    """Keep the smallest set of most probable tokens whose probabilities reach p. values: [N] float64, 1 is off.

    Nucleus sampling, Holtzman et al., arXiv 1904.09751, section 3.1. The most probable token always stays.
    """
    ascending, order = logits.sort(dim=-1)  # [N, V]
    below = ascending.softmax(dim=-1).cumsum(dim=-1)
    drop_sorted = below <= (1 - values).to(below.dtype)[:, None]  # 1 − p in float64 first, as transformers has it
    drop_sorted[:, -1] = False
    drop_sorted &= (values < 1)[:, None]
    drop = torch.zeros_like(drop_sorted).scatter(-1, order, drop_sorted)
    return logits.masked_fill(drop, _NEG_INF)
