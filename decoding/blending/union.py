"""Candidate tokens of an ensemble whose members have different vocabularies.

All logits are over the leader's tokens. Knows nothing of tokenizers or blends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_NEG_INF = float("-inf")
_GAP = 1e4  # between the worst candidate and all other tokens; no bias closes it


def replace_empty(logits: Tensor, fallback: Tensor) -> Tensor:
    """Replace rows of a member's logits that are all −∞ by those of `fallback`. Both: [N, V]."""
    return torch.where(logits.amax(dim=-1, keepdim=True) == _NEG_INF, fallback, logits)


def top_k_union(own: Tensor, count: int, others: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return the union of each member's `count` most probable tokens, [N, V] bool (Yao et al., arXiv 2410.03777).

    Args:
        own: [N, V] the leader's logits.
        others: [M − 1][N] the most probable tokens of each other member; those beyond V, its padding, don't count.
    """
    union = torch.zeros_like(own, dtype=torch.bool)
    union.scatter_(-1, own.topk(min(count, own.shape[-1]), dim=-1).indices, True)
    pairs = [
        (row, token) for best in others for row, tokens in enumerate(best) for token in tokens if token < own.shape[-1]
    ]
    if pairs:
        rows, tokens = torch.tensor(pairs, device=own.device).T
        union[rows, tokens] = True
    return union


def keep_candidates(logits: Tensor, candidates: Tensor) -> Tensor:
    """Set the logits of all tokens but the candidates to −∞. Both: [N, V]."""
    return logits.masked_fill(~candidates, _NEG_INF)


def rank_others_below(blended: Tensor, own: Tensor, candidates: Tensor) -> Tensor:
    """Add all other tokens to a blend of candidates, far below them and in the leader's order. Each: [N, V].

    So tokens remain if a request forbids all candidates, for instance by its grammar.
    """
    least = blended.masked_fill(blended == _NEG_INF, torch.inf).amin(dim=-1, keepdim=True)
    others = least - _GAP + own - own.amax(dim=-1, keepdim=True)
    return torch.where(candidates, blended, others)
