"""Drafts: chains or trees of tokens for the target to verify."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

MAX_DRAFT_LENGTH = 64  # tokens of one path; longer paths are cut
LONGEST_DRAFT = 32  # tokens that a request may let a step verify

ProposerName = Literal["drafter", "ngram", "medusa", "eagle3", "mtp", "dflash", "pard", "self", "prediction", "corpus"]
LOOKUPS: frozenset[ProposerName] = frozenset({"ngram", "prediction", "corpus"})  # which copy, without a model
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

    def depths(self) -> list[int]:
        """Return the depth of each token, [K]; 1: it follows the text."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def paths(self) -> list[tuple[int, ...]]:
        """Return the tokens from the text down to each token, itself included, [K]."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths


NO_DRAFT = Draft([], [])


class TokenTree:
    """A draft that grows path by path. Nodes are numbered as they are added, so parents come first."""

    def __init__(self) -> None:
        self.draft = Draft([], [])
        self._nodes: dict[tuple[int, int], int] = {}  # by parent, −1 for the root, and token

    def __len__(self) -> int:
        return len(self.draft.tokens)

    def size_with(self, tokens: Sequence[int]) -> int:
        """Return the number of nodes that the tree would have with another path."""
        return len(self) + len(tokens) - len(self.find(tokens))

    def add(self, tokens: Sequence[int], probabilities: Sequence[float] | None = None) -> int:
        """Insert a path from the root, and return the node of its last token; −1 if it is empty.

        probabilities: [K] of each token; a node keeps the highest. Give them for all paths of a tree, or for none.
        """
        parent = -1
        for index, token in enumerate(tokens):
            node = self._nodes.setdefault((parent, token), len(self))
            if node == len(self):
                self.draft.tokens.append(token)
                self.draft.parents.append(parent)
                if probabilities is not None:
                    self.draft.probabilities.append(probabilities[index])
            elif probabilities is not None:
                self.draft.probabilities[node] = max(self.draft.probabilities[node], probabilities[index])
            parent = node
        return parent

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes of the longest prefix of a path that the tree has."""
        path: list[int] = []
        for token in tokens:
            node = self._nodes.get((path[-1] if path else -1, token))
            if node is None:
                break
            path.append(node)
        return path
