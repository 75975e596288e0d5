"""Drafts: chains or trees of tokens for the target to verify. Knows nothing of verification."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

MAX_DRAFT_LENGTH = 64  # tokens of one path; longer paths are cut

ProposerName = Literal["drafter", "ngram", "medusa", "eagle3"]
Proposers = tuple[ProposerName, ...]  # of one token, the first to offer it first


class Distribution(NamedTuple):
    """The distribution of a draft token: k tokens in the order in which the noise draws them, and their probabilities.

    Siblings are drawn without replacement, so the n-th sibling is the n-th token. In an offer, an empty distribution
    stands for the one that the token was offered with before.
    """

    tokens: list[int]  # [k]
    probabilities: list[float]  # [k], sum 1; above 0 for tokens that were drawn

    @property
    def is_sound(self) -> bool:
        """Whether this is a probability distribution over distinct tokens."""
        return (
            len(self.tokens) == len(self.probabilities) == len(set(self.tokens))
            and min(self.probabilities, default=-1.0) >= 0
            and math.isclose(sum(self.probabilities), 1, abs_tol=1e-3)
        )


@lru_cache(maxsize=2 * MAX_DRAFT_LENGTH)
def chain_parents(length: int) -> list[int]:
    """Return the parents of a chain's tokens, [length]. All callers share the list, so it must not change."""
    return list(range(-1, length - 1))


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A tree of K draft tokens, often a chain. Parents come before their children."""

    tokens: list[int]  # [K]
    parents: list[int]  # [K] the index of the token that each follows; −1: it follows the text
    probabilities: list[float] = []  # [K] that each token is committed, falling; [] if unknown
    distributions: list[Distribution | None] = []  # [K] or []; None: not drawn
    proposers: list[Proposers] = []  # [K] who offered each token; [] if unknown

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.parents))

    def first(self, count: int) -> "Draft":
        """Return the first `count` tokens as a draft."""
        if count >= len(self.tokens):
            return self
        if count == 0:
            return NO_DRAFT
        return Draft(
            self.tokens[:count],
            self.parents[:count],
            self.probabilities[:count],
            self.distributions[:count],
            self.proposers[:count],
        )

    def children(self) -> list[list[int]]:
        """Return the indices of the tokens that follow the text, and that follow each token, [K + 1]."""
        children: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for index, parent in enumerate(self.parents):
            children[parent + 1].append(index)
        return children

    def proposed_by(self) -> dict[str, int]:
        """Return how many of the tokens each proposer offered first."""
        count = len(self.proposers)
        if count and self.proposers.count(self.proposers[0]) == count:  # as for most drafts
            return {self.proposers[0][0]: count}
        return dict(Counter([names[0] for names in self.proposers]))

    def depths(self) -> Sequence[int]:
        """Return the depth of each token, [K]; 1: it follows the text."""
        if self.is_chain:
            return range(1, len(self.parents) + 1)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def paths(self) -> list[tuple[int, ...]]:
        """Return the tokens from the text down to each token, itself included, [K]."""
        if self.is_chain:
            tokens = tuple(self.tokens)
            return [tokens[:end] for end in range(1, len(tokens) + 1)]
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths


NO_DRAFT = Draft([], [])
