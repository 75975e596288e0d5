"""Verification: how much of a draft is what the target itself chose.

Coupled rule (docs/architecture.md; Daliri et al., arXiv 2408.07978): the target samples its own token at every
position of the draft, and a draft token is accepted if and only if it is that token. Greedy verification is the
same rule without noise. What is committed is always the target's own sample, so no draft can change the text.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafts import Draft


def accepted_lengths(sampled: Tensor, drafts: Tensor, draft_lengths: Tensor) -> Tensor:
    """How many leading draft tokens of each row the target also chose.

    Args:
        sampled: [B, Q] int64, the target's tokens after the last committed and after each draft token; Q = K + 1.
        drafts: [B, K] int64, padded on the right.
        draft_lengths: [B] int64, each from 0 to K.

    Returns:
        [B] int64. Row i commits sampled[i, : accepted + 1]: its accepted tokens, then the recovered or bonus token.
    """
    columns = torch.arange(drafts.shape[1], device=drafts.device)
    agrees = (sampled[:, :-1] == drafts) & (columns < draft_lengths[:, None])  # [B, K]
    return agrees.long().cumprod(dim=-1).sum(dim=-1)


def accepted_path(sampled: Sequence[int], draft: Draft) -> tuple[list[int], bool]:
    """The draft tokens that the target also chose, walking down from the text. A chain is a tree with one branch.

    Args:
        sampled: [K + 1] the target's tokens: after the text, then after each draft token.
        draft: [K]

    Returns:
        The places of the accepted tokens, top down, A of them. The row commits these tokens and then the target's own,
        sampled[last place + 1]. And whether that differs from what was drafted there: False if nothing was.
    """
    path: list[int] = []
    at = -1
    tested = False
    for place, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent != at:
            continue
        tested = token != sampled[at + 1]
        if not tested:
            path.append(place)
            at = place
    return path, tested
