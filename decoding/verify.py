"""Verification: how much of a draft is what the target itself chose.

Coupled rule (docs/architecture.md; Daliri et al., arXiv 2408.07978): the target samples its own token at every
position of the draft, and a draft token is accepted if and only if it is that token. Greedy verification is the
same rule without noise. What is committed is always the target's own sample, so no draft can change the text.
"""

from collections.abc import Sequence

from decoding.drafts import Draft


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
