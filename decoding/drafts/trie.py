"""The trie of proposed continuations of one request. Under coupled verification no draft can change the text.

Under rejection sampling a draft changes the text, but not its distribution, if the choice of tokens to verify does not
depend on which tokens they are. So tokens that a drafter drew are stored separately and chosen by position alone.
After a rejection they are drawn anew (docs/verification.md).
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from decoding.drafts.draft import (
    MAX_DRAFT_LENGTH,
    NO_DRAFT,
    Distribution,
    Draft,
    ProposerName,
    Proposers,
    chain_parents,
)

_NEW_NODES = 1024  # tokens that can be added between two commits; bounds the memory


class _Node:
    __slots__ = ("children", "distribution", "drawn", "probability", "proposers")

    def __init__(self, probability: float = 1.0, proposers: Proposers = ()) -> None:
        self.probability = probability  # that the target chooses it, given the tokens above
        self.proposers = proposers  # that offered it
        self.children: dict[int, _Node] = {}  # by token, in the order of the offers
        self.drawn: dict[int, _Node] = {}  # children drawn by a drafter, by token, in the order of the draw
        self.distribution: Distribution | None = None  # of the drawn children


class DraftTrie:
    """Draft tokens after the committed text, which is the root.

    Proposers offer any path at any time. Offers that contradict the committed text, or start beyond it, are dropped.
    """

    def __init__(self, committed: list[int], *, rejects: bool = False) -> None:
        """
        committed: the request's tokens, prompt included; shared with the owner. Only `commit` appends to it.
        rejects: verification is by rejection sampling.
        """
        self._committed = committed
        self._root = _Node()
        self._room = _NEW_NODES
        self._rejects = rejects
        self._fence = len(committed) if rejects else 0  # offers for earlier positions are refused
        self.default_probability = 0.5  # of a token offered without one; the n-th sibling gets 1/n of it
        self._best: Draft | None = None  # cached `best_path` without limit; None: out of date
        self._has_choice = False  # whether there are other drafts, or drawn tokens

    def __bool__(self) -> bool:
        return bool(self._root.drawn or self._root.children)

    def offer(
        self,
        base: int,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        probabilities: Sequence[float] | None = None,
        distributions: Sequence[tuple[list[int], list[float]] | None] | None = None,
        proposer: ProposerName = "drafter",
    ) -> bool:
        """Add a chain or a tree of tokens. Returns whether any of them extends the committed text.

        Args:
            base: absolute position of the first token.
            tokens: [K]
            parents: [K] as in `Draft`; None: a chain.
            probabilities: [K] that the target chooses each token, given the tokens above it.
            distributions: [K] as in `Distribution`, the one that each token was drawn from; None: it was not drawn.
            proposer: who offers them.
        """
        overlap = len(self._committed) - base
        if base < self._fence or overlap < 0 or (parents is not None and len(parents) != len(tokens)):
            return False
        if probabilities is None or len(probabilities) != len(tokens):
            probabilities = [-1.0] * len(tokens)
        if distributions is None and (parents is None or parents == chain_parents(len(tokens))):
            return self._offer_chain(overlap, tokens, probabilities, proposer)
        if distributions is None or not self._rejects:
            distributions = [None] * len(tokens)
        elif len(distributions) != len(tokens):
            return False
        self._best = None
        nodes: list[tuple[_Node | None, int]] = []  # [K] each token's node, None if not in the trie, and its depth
        top = (self._root if overlap == 0 else None, -overlap)
        fits = False
        for index, (token, probability, drawn_from) in enumerate(
            zip(tokens, probabilities, distributions, strict=True)
        ):
            parent = index - 1 if parents is None else parents[index]
            if not -1 <= parent < index:
                return fits
            origin = None if drawn_from is None else Distribution(*drawn_from)
            nodes.append(self._add(*(nodes[parent] if parent >= 0 else top), token, probability, origin, proposer))
            fits |= nodes[-1][0] is not None and nodes[-1][1] > 0
        return fits

    def _offer_chain(
        self, overlap: int, tokens: Sequence[int], probabilities: Sequence[float], proposer: ProposerName
    ) -> bool:
        """Add a chain, which is usual. overlap: how many committed tokens it should begin with."""
        if len(tokens) <= overlap or (overlap and list(tokens[:overlap]) != self._committed[-overlap:]):
            return False
        self._best = None
        end = overlap + MAX_DRAFT_LENGTH
        node: _Node | None = self._root
        for token, probability in zip(tokens[overlap:end], probabilities[overlap:end], strict=True):
            node = node and self._child(node, token, probability, proposer)
        return tokens[overlap] in self._root.children

    def _add(
        self,
        node: _Node | None,
        depth: int,
        token: int,
        probability: float,
        drawn_from: Distribution | None,
        proposer: ProposerName,
    ) -> tuple[_Node | None, int]:
        """Return the node of a token below `node`, and its depth. At a depth below 0 it must be the committed token."""
        if depth < 0:
            if token != self._committed[depth]:
                return None, 1
            return (self._root if depth == -1 else None), depth + 1
        if node is None or depth == MAX_DRAFT_LENGTH:
            return None, depth
        if drawn_from is not None:
            return self._draw(node, token, drawn_from, proposer), depth + 1
        return self._child(node, token, probability, proposer), depth + 1

    def _child(self, node: _Node, token: int, probability: float, proposer: ProposerName) -> _Node | None:
        """Return the node of an undrawn token below `node`; None without room. probability: −1 if unknown."""
        child = node.children.get(token)
        if child is not None:
            child.proposers = _including(child.proposers, proposer)
        elif self._room > 0:
            self._room -= 1
            child = node.children[token] = _Node(self.default_probability / (1 + len(node.children)), (proposer,))
        if child is not None and 0 <= probability <= 1:
            child.probability = probability
        return child

    def _draw(self, node: _Node, token: int, drawn_from: Distribution, proposer: ProposerName) -> _Node | None:
        """Return the node of a drawn token below `node`; None unless it comes next in the draw of its siblings."""
        child = node.drawn.get(token)
        if drawn_from.tokens and drawn_from != (node.distribution or drawn_from):
            return None
        if child is not None:
            child.proposers = _including(child.proposers, proposer)
            return child
        rank = len(node.drawn)
        is_sound = bool(node.drawn) or drawn_from.is_sound
        follows = is_sound and drawn_from.tokens[rank : rank + 1] == [token] and drawn_from.probabilities[rank] > 0
        if follows and self._room > 0:
            self._room -= 1
            node.distribution = drawn_from
            child = node.drawn[token] = _Node(proposers=(proposer,))
        return child

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens, keep the subtree below them and drop the rest."""
        self._best = None
        self._committed.extend(tokens)
        if self._root.drawn or self._root.children:
            for token in tokens:
                self._root = self._root.drawn.get(token) or self._root.children.get(token) or _Node()
        self._room = _NEW_NODES

    def fence(self) -> None:
        """Drop all draft tokens after a rejection, and refuse offers for positions before the end of the text.

        The noise of those positions decided the rejection, so drafters start a new stream here.
        """
        self._root, self._best = _Node(), None
        self._fence = len(self._committed)

    @property
    def best_length(self) -> int:
        """The length of `best_path` without limit."""
        return len(self._best_chain().tokens)

    def best_path(self, limit: int) -> list[int]:
        """Return a greedy path of at most `limit` tokens: always the most probable child, the earliest one at a tie."""
        return self._best_chain().tokens[:limit]

    def best_draft(self, size: int, depth: int, *, branching: bool = True) -> Draft:
        """Return the `size` tokens most probably committed, none deeper than `depth`. They are sorted by probability.

        branching: may be a tree; otherwise a chain, as in `best_path`.

        A token is committed with the product of the probabilities on its path (Sequoia, arXiv 2402.12374, section 3).
        """
        best = self._best_chain()
        if not self._has_choice:
            return best.first(max(0, min(size, depth)))
        draft = Draft([], [], [], [], [])
        heap: list[tuple[float, int, int, int, int, Distribution | None, _Node]] = []
        order = count()

        def push(node: _Node, probability: float, index: int, level: int) -> None:
            drawn_from = node.distribution if node.drawn else None
            children = self._children(node)
            for share, token, child in children if branching else _most_probable(children):
                heappush(heap, (-probability * share, next(order), token, index, level, drawn_from, child))

        if depth > 0:
            push(self._root, 1.0, -1, 1)
        while heap and len(draft.tokens) < size:
            negative, _, token, parent, level, drawn_from, node = heappop(heap)
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.probabilities.append(-negative)
            draft.distributions.append(drawn_from)
            draft.proposers.append(node.proposers)
            if level < depth:
                push(node, -negative, len(draft.tokens) - 1, level + 1)
        return draft

    def _best_chain(self) -> Draft:
        """Return the whole `best_path` as a draft. It is the only one unless `_has_choice`."""
        if self._best is None and not self:
            self._best, self._has_choice = NO_DRAFT, False
        if self._best is None:
            tokens: list[int] = []
            probabilities: list[float] = []
            proposers: list[Proposers] = []
            node, probability, self._has_choice = self._root, 1.0, False
            while children := node.drawn or node.children:
                if len(children) == 1:
                    self._has_choice |= bool(node.drawn)
                    ((token, node),) = children.items()
                else:
                    _, token, node = max(self._children(node), key=itemgetter(0))
                    self._has_choice = True
                probability *= node.probability
                tokens.append(token)
                probabilities.append(probability)
                proposers.append(node.proposers)
            self._best = Draft(tokens, chain_parents(len(tokens)), probabilities, [], proposers)
        return self._best

    def _children(self, node: _Node) -> Iterator[tuple[float, int, _Node]]:
        """Yield the children of a node that may be verified: probability, token, node.

        If any were drawn, only those count, by rank: their choice must not depend on which tokens they are.
        """
        if node.drawn:
            for rank, (token, child) in enumerate(node.drawn.items()):
                yield self.default_probability / (1 + rank), token, child
        else:
            for token, child in node.children.items():
                yield child.probability, token, child


def _including(proposers: Proposers, proposer: ProposerName) -> Proposers:
    return proposers if proposer in proposers else (*proposers, proposer)


def _most_probable(children: Iterable[tuple[float, int, _Node]]) -> Iterable[tuple[float, int, _Node]]:
    """Return the most probable child alone, the earliest one at a tie; nothing if there is none."""
    best = max(children, key=itemgetter(0), default=None)
    return () if best is None else (best,)
