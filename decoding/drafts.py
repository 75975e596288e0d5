"""The trie of proposed continuations of one request. Drafts are hints: nothing offered here can change the text.

Under rejection sampling a draft does change the text, though not its distribution, as long as which tokens are verified
does not depend on what they are. So then tokens that a drafter drew are kept apart from others, are chosen by where
they stand alone, and give way to a new draw after every rejection (docs/verification.md).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter
from typing import NamedTuple

MAX_DRAFT_LENGTH = 64  # tokens of one path; more are cut off
_NEW_NODES = 1024  # tokens that may be added between two commits, so that no proposer can fill the memory


class Distribution(NamedTuple):
    """What a draft token was drawn from: k tokens in the order in which the noise draws them, and their probabilities.

    So the first of the siblings drawn from it is the first of its tokens, the second the second. An empty one, in an
    offer, stands for the one that the same token or its siblings were offered with before.
    """

    tokens: list[int]  # [k]
    probabilities: list[float]  # [k], those of what was drawn above 0; their sum is 1

    @property
    def is_sound(self) -> bool:
        return (
            len(self.tokens) == len(self.probabilities) == len(set(self.tokens))
            and min(self.probabilities, default=-1.0) >= 0
            and math.isclose(sum(self.probabilities), 1, abs_tol=1e-3)
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of K draft tokens, or a chain of them, in an order in which parents come first."""

    tokens: list[int]  # [K]
    parents: list[int]  # [K] the place of the token that each follows; -1: it follows the text
    chances: list[float] = field(default_factory=list)  # [K] of each to be committed, if known; falling
    distributions: list[Distribution | None] = field(default_factory=list)  # [K], if known; None: it was not drawn

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def first(self, count: int) -> "Draft":
        """Its first `count` tokens."""
        return Draft(self.tokens[:count], self.parents[:count], self.chances[:count], self.distributions[:count])

    def children(self) -> list[list[int]]:
        """[K + 1] indices of the tokens that follow the text, then of those that follow each token."""
        children: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for index, parent in enumerate(self.parents):
            children[parent + 1].append(index)
        return children

    def depths(self) -> list[int]:
        """[K] how far below the text each token stands, from 1 on."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def paths(self) -> list[tuple[int, ...]]:
        """[K] the tokens from the text down to each token, itself included."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths


class _Node:
    """One draft token, or the root."""

    __slots__ = ("chance", "children", "distribution", "drawn")

    def __init__(self, chance: float = 1.0) -> None:
        self.chance = chance  # to be the target's token, should those above be
        self.children: dict[int, _Node] = {}  # by token, in the order offered
        self.drawn: dict[int, _Node] = {}  # those that count as drawn, by token, in the order of the draw
        self.distribution: Distribution | None = None  # what they were drawn from


class DraftTrie:
    """Draft tokens below the last committed token.

    The root stands for the committed text, `base` tokens long. Any proposer may offer any path at any time; offers
    that contradict the committed text, or that start beyond it, are dropped.
    """

    def __init__(self, committed: list[int], *, rejects: bool = False) -> None:
        """
        committed: the request's tokens, prompt included; shared with the owner, who appends through `commit`.
        rejects: verification is by rejection sampling.
        """
        self._committed = committed
        self._root = _Node()
        self._room = _NEW_NODES
        self._rejects = rejects
        self._fence = len(committed) if rejects else 0  # offers from before are refused
        self.usual_chance = 0.5  # of a token whose proposer gives none; half of that for its second, …
        self._best: list[int] | None = None  # `best_path` without limit; None: not looked for since the last change

    def __bool__(self) -> bool:
        """Whether there is any draft."""
        return bool(self._root.drawn or self._root.children)

    def offer(
        self,
        base: int,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        chances: Sequence[float] | None = None,
        distributions: Sequence[tuple[list[int], list[float]] | None] | None = None,
    ) -> bool:
        """Add a chain or a tree of `tokens` from absolute position `base` on. True if any of it fits.

        Args:
            base: the absolute position of the first.
            tokens: [K]
            parents: [K] as in `Draft`; None: each follows the one before it.
            chances: [K] of each token to be the target's, should those above it be.
            distributions: [K] what each token was drawn from, as in `Distribution`; None: it was not drawn.
        """
        behind = len(self._committed) - base
        if base < self._fence or behind < 0 or (parents is not None and len(parents) != len(tokens)):
            return False
        if chances is None or len(chances) != len(tokens):
            chances = [-1.0] * len(tokens)
        if distributions is None or not self._rejects:
            distributions = [None] * len(tokens)
        elif len(distributions) != len(tokens):
            return False
        self._best = None
        above: list[tuple[_Node | None, int]] = []  # by token: where it is (None: not in the trie), and its depth
        top = (self._root if behind == 0 else None, -behind)
        fits = False
        for place, (token, chance, drawn_from) in enumerate(zip(tokens, chances, distributions, strict=True)):
            parent = place - 1 if parents is None else parents[place]
            if not -1 <= parent < place:
                return fits
            origin = None if drawn_from is None else Distribution(*drawn_from)
            above.append(self._add(*(above[parent] if parent >= 0 else top), token, chance, origin))
            fits |= above[-1][0] is not None and above[-1][1] > 0
        return fits

    def _add(
        self, node: _Node | None, depth: int, token: int, chance: float, drawn_from: Distribution | None
    ) -> tuple[_Node | None, int]:
        """Where a token below `node` is, and its depth; up to the root, by depth, it must be the committed one."""
        if depth < 0:
            if token != self._committed[depth]:
                return None, 1
            return (self._root if depth == -1 else None), depth + 1
        if node is None or depth == MAX_DRAFT_LENGTH:
            return None, depth
        if drawn_from is not None:
            return self._draw(node, token, drawn_from), depth + 1
        child = node.children.get(token)
        if child is None and self._room > 0:
            self._room -= 1
            child = node.children[token] = _Node(self.usual_chance / (1 + len(node.children)))
        if child is not None and 0 <= chance <= 1:
            child.chance = chance
        return child, depth + 1

    def _draw(self, node: _Node, token: int, drawn_from: Distribution) -> _Node | None:
        """Where a drawn token below `node` is; None unless it is of the draw of those there, and next in it."""
        if not drawn_from.tokens and node.distribution is not None:
            drawn_from = node.distribution
        if drawn_from != (node.distribution or drawn_from) or not (node.drawn or drawn_from.is_sound):
            return None
        rank = len(node.drawn)
        follows = drawn_from.tokens[rank : rank + 1] == [token] and drawn_from.probabilities[rank] > 0
        if token not in node.drawn and follows and self._room > 0:
            self._room -= 1
            node.distribution = drawn_from
            node.drawn[token] = _Node()
        return node.drawn.get(token)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens; keep the subtree below them and drop all else."""
        self._best = None
        self._committed.extend(tokens)
        for token in tokens:
            self._root = self._root.drawn.get(token) or self._root.children.get(token) or _Node()
        self._room = _NEW_NODES

    def fence(self) -> None:
        """Drop all, and refuse what was offered from earlier positions than the text's end: a draft was rejected.

        Rejection sampling has looked at the noise behind it; so a drafter begins a stream of its own here, too.
        """
        self._root, self._best = _Node(), None
        self._fence = len(self._committed)

    def best_path(self, limit: int) -> list[int]:
        """At most `limit` tokens, each the most probable after the one before it; the earliest offered among equals."""
        if self._best is None:
            self._best = []
            below = list(self._below(self._root))
            while below:
                _, token, node = max(below, key=itemgetter(0))
                self._best.append(token)
                below = list(self._below(node))
        return self._best[:limit]

    def best_draft(self, size: int, depth: int) -> Draft:
        """The most probable `size` tokens, none deeper than `depth`: a chain where that is best.

        A token's chance to be accepted is the product of those on its path, and the sum of all is how many are expected
        to be (Sequoia, arXiv 2402.12374, section 3). The first n of them are the best n.
        """
        draft = Draft([], [], [], [])
        heap: list[tuple[float, int, int, int, int, Distribution | None, _Node]] = []
        order = count()

        def push(node: _Node, chance: float, place: int, level: int) -> None:
            drawn_from = node.distribution if node.drawn else None
            for share, token, child in self._below(node):
                heappush(heap, (-chance * share, next(order), token, place, level, drawn_from, child))

        if depth > 0:
            push(self._root, 1.0, -1, 1)
        while heap and len(draft.tokens) < size:
            negative, _, token, parent, level, drawn_from, node = heappop(heap)
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.chances.append(-negative)
            draft.distributions.append(drawn_from)
            if level < depth:
                push(node, -negative, len(draft.tokens) - 1, level + 1)
        return draft

    def _below(self, node: _Node) -> Iterator[tuple[float, int, _Node]]:
        """What to verify below a node: the chance, the token and where it is.

        Where tokens were drawn, these alone: how good they look must not matter, and others might be among them.
        """
        if node.drawn:
            for rank, (token, child) in enumerate(node.drawn.items()):
                yield self.usual_chance / (1 + rank), token, child
        else:
            for token, child in node.children.items():
                yield child.chance, token, child
