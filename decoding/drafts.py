"""The trie of proposed continuations of one request. Drafts are hints: nothing offered here can change the text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

MAX_DRAFT_LENGTH = 64  # tokens of one path; more are cut off
_NEW_NODES = 1024  # tokens that may be added between two commits, so that no proposer can fill the memory


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of K draft tokens, or a chain of them, in an order in which parents come first."""

    tokens: list[int]  # [K]
    parents: list[int]  # [K] the place of the token that each follows; -1: it follows the text
    chances: list[float] = field(default_factory=list)  # [K] of each to be committed, if known; falling

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def first(self, count: int) -> "Draft":
        """Its first `count` tokens."""
        return Draft(self.tokens[:count], self.parents[:count], self.chances[:count])

    def depths(self) -> list[int]:
        """[K] how far below the text each token stands, from 1 on."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


class _Node:
    """One draft token, or the root."""

    __slots__ = ("chance", "children")

    def __init__(self, chance: float = 1.0) -> None:
        self.chance = chance  # to be the target's token, should those above be
        self.children: dict[int, _Node] = {}  # by token, in the order offered


class DraftTrie:
    """Draft tokens below the last committed token.

    The root stands for the committed text, `base` tokens long. Any proposer may offer any path at any time; offers
    that contradict the committed text, or that start beyond it, are dropped.
    """

    def __init__(self, committed: list[int]) -> None:
        """committed: the request's tokens, prompt included; shared with the owner, who appends through `commit`."""
        self._committed = committed
        self._root = _Node()
        self._room = _NEW_NODES
        self.usual_chance = 0.5  # of a token whose proposer gives none; half of that for its second, …

    def __bool__(self) -> bool:
        """Whether there is any draft."""
        return bool(self._root.children)

    def offer(
        self,
        base: int,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        chances: Sequence[float] | None = None,
    ) -> bool:
        """Add a chain or a tree of `tokens` from absolute position `base` on. True if any of it fits.

        Args:
            base: the absolute position of the first.
            tokens: [K]
            parents: [K] as in `Draft`; None: each follows the one before it.
            chances: [K] of each token to be the target's, should those above it be.
        """
        behind = len(self._committed) - base
        if base < 0 or behind < 0 or (parents is not None and len(parents) != len(tokens)):
            return False
        if chances is None or len(chances) != len(tokens):
            chances = [-1.0] * len(tokens)
        above: list[tuple[_Node | None, int]] = []  # by token: where it is (None: not in the trie), and its depth
        top = (self._root if behind == 0 else None, -behind)
        fits = False
        for place, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            parent = place - 1 if parents is None else parents[place]
            if not -1 <= parent < place:
                return fits
            above.append(self._add(*(above[parent] if parent >= 0 else top), token, chance))
            fits |= above[-1][0] is not None and above[-1][1] > 0
        return fits

    def _add(self, node: _Node | None, depth: int, token: int, chance: float) -> tuple[_Node | None, int]:
        """Where a token below `node` is, and its depth; up to the root, by depth, it must be the committed one."""
        if depth < 0:
            if token != self._committed[depth]:
                return None, 1
            return (self._root if depth == -1 else None), depth + 1
        if node is None or depth == MAX_DRAFT_LENGTH:
            return None, depth
        child = node.children.get(token)
        if child is None and self._room > 0:
            self._room -= 1
            child = node.children[token] = _Node(self.usual_chance / (1 + len(node.children)))
        if child is not None and 0 <= chance <= 1:
            child.chance = chance
        return child, depth + 1

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens; keep the subtree below them and drop all else."""
        self._committed.extend(tokens)
        for token in tokens:
            self._root = self._root.children.get(token) or _Node()
        self._room = _NEW_NODES

    def best_path(self, limit: int) -> list[int]:
        """At most `limit` tokens, each the most probable after the one before it; the earliest offered among equals."""
        path: list[int] = []
        node = self._root
        while node.children and len(path) < limit:
            token, node = max(node.children.items(), key=_chance)
            path.append(token)
        return path

    def best_draft(self, size: int, depth: int) -> Draft:
        """The most probable `size` tokens, none deeper than `depth`: a chain where that is best.

        A token's chance to be accepted is the product of those on its path, and the sum of all is how many are expected
        to be (Sequoia, arXiv 2402.12374, section 3). The first n of them are the best n.
        """
        draft = Draft([], [], [])
        heap: list[tuple[float, int, int, int, int, _Node]] = []
        order = count()

        def push(node: _Node, chance: float, place: int, level: int) -> None:
            for token, child in node.children.items():
                heappush(heap, (-chance * child.chance, next(order), token, place, level, child))

        if depth > 0:
            push(self._root, 1.0, -1, 1)
        while heap and len(draft.tokens) < size:
            negative, _, token, parent, level, node = heappop(heap)
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.chances.append(-negative)
            if level < depth:
                push(node, -negative, len(draft.tokens) - 1, level + 1)
        return draft


def _chance(item: tuple[int, _Node]) -> float:
    return item[1].chance
