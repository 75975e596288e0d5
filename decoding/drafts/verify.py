"""Coupled verification: accepts the draft tokens that the target itself samples.

The target samples its own token at every position of the draft. A draft token is accepted if and only if it equals that
token (docs/architecture.md; Daliri et al., arXiv 2408.07978). Greedy verification is the same rule without noise. Only
the target's samples are committed, so no draft can change the text.
"""

from collections.abc import Sequence

from decoding.drafts.draft import Draft


def accepted_path(sampled: Sequence[int], draft: Draft) -> tuple[list[int], bool]:
    """Find the path of accepted draft tokens, from the text down.

    Args:
        sampled: [K + 1] the target's tokens: after the text, then after each draft token.
        draft: [K]

    Returns:
        The indices of the A accepted tokens, top down; the row commits them, then sampled[last index + 1].
        Whether a draft token was rejected after them; False if the draft ends there.
    """
    if draft.is_chain:
        for accepted, (token, own) in enumerate(zip(draft.tokens, sampled, strict=False)):
            if token != own:
                return list(range(accepted)), True
        return list(range(len(draft.tokens))), False
    path: list[int] = []
    last = -1
    rejected = False
    for index, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent != last:
            continue
        rejected = token != sampled[last + 1]
        if not rejected:
            path.append(index)
            last = index
    return path, rejected
