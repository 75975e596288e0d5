"""What becomes of tokens that not all members of an ensemble have, or find probable.

All logits are of the leader's tokens. Knows nothing of tokenizers or blends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_NEG_INF = float("-inf")
_FAR = 1e4  # below the worst of the candidates, which no bias makes up for


def replace_empty(logits: Tensor, instead: Tensor) -> Tensor:
    """The member's logits [N, V], or those in `instead` where it has nothing to say: where all of them are −∞."""
    return torch.where(logits.amax(dim=-1, keepdim=True) == _NEG_INF, instead, logits)


def top_k_union(own: Tensor, count: int, others: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """[N, V] bool: what is among the `count` most probable tokens of the leader, or of another member.

    The candidates of Yao et al., arXiv 2410.03777.

    Args:
        own: [N, V] the leader's logits.
        others: for each other member, [N] its most probable tokens.
    """
    union = torch.zeros_like(own, dtype=torch.bool)
    union.scatter_(-1, own.topk(min(count, own.shape[-1]), dim=-1).indices, True)
    pairs = [(at, token) for best in others for at, tokens in enumerate(best) for token in tokens]
    if pairs:
        rows, tokens = torch.tensor(pairs, device=own.device).T
        union[rows, tokens] = True
    return union


def keep_candidates(logits: Tensor, candidates: Tensor) -> Tensor:
    """The logits [N, V] with all but the candidates [N, V] ruled out."""
    return logits.masked_fill(~candidates, _NEG_INF)


def rank_others_below(blended: Tensor, own: Tensor, candidates: Tensor) -> Tensor:
    """A blend of candidates with all other tokens far below them, in the leader's order.

    So something is left where a request rules all candidates out, as a structure does in which none of them has a
    place. Shapes: [N, V], each.
    """
    least = blended.masked_fill(blended == _NEG_INF, torch.inf).amin(dim=-1, keepdim=True)
    beyond = least - _FAR + own - own.amax(dim=-1, keepdim=True)
    return torch.where(candidates, blended, beyond)
