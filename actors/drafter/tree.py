"""A drafter's tree of possible continuations: which node to run next, and which cache column each has."""

from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush

from decoding.drafts.choices import DraftChoice

_MIN_PROBABILITY = 0.01  # a less probable alternative is not worth a message


class DraftNode:
    """One token. It is pending until the model has run it."""

    __slots__ = ("children", "choice", "column", "parent", "position", "probability", "token")

    def __init__(self, token: int, position: int, probability: float = 1.0, parent: "DraftNode | None" = None) -> None:
        self.token = token
        self.position = position  # in the text
        self.probability = probability  # that the target's text contains this path
        self.parent = parent
        self.column = -1  # in the KV slot; -1: pending, or the root
        self.choice: DraftChoice | None = None  # of the next token
        self.children: dict[int, DraftNode] = {}  # by token, best first; those worth following

    def __lt__(self, other: "DraftNode") -> bool:
        return self.probability > other.probability

    def descendants(self) -> Iterator["DraftNode"]:
        for child in self.children.values():
            yield child
            yield from child.descendants()

    def path(self) -> list["DraftNode"]:
        """Return the nodes from the root, exclusive, to this one."""
        nodes: list[DraftNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class DraftTree:
    """The nodes below a text's last token, the root."""

    def __init__(self, root: DraftNode, last_position: int, ends: Collection[int]) -> None:
        """last_position: the last position to draft. ends: tokens that end a text."""
        self.root = root
        root.parent = None
        self.last_position = last_position
        self._ends = ends
        self.ran = 0  # nodes below the root that are not pending
        self._pending: list[DraftNode] = []  # a heap
        for node in root.descendants():
            node.probability /= root.probability
            if node.column >= 0:
                self.ran += 1
            else:
                self._pending.append(node)
        root.probability = 1.0
        heapify(self._pending)

    def tip(self) -> DraftNode:
        """Return the last node of the chain, the path that the drafter itself prefers; the root if it is empty."""
        node = self.root
        while node.children:
            node = next(iter(node.children.values()))
        return node

    def can_run(self, node: DraftNode) -> bool:
        return node.position < self.last_position and node.token not in self._ends

    def has_pending(self) -> bool:
        """Whether there are nodes to run, including the tip of the chain."""
        while self._pending and not (self._pending[0].column < 0 and self.can_run(self._pending[0])):
            heappop(self._pending)
        return bool(self._pending)

    def pop_pending(self) -> DraftNode:
        """Take the most promising node to run. The caller checks `has_pending` first, and gives the node a column."""
        return heappop(self._pending)

    def expand(self, node: DraftNode, choice: DraftChoice, probabilities: Sequence[float]) -> list[DraftNode]:
        """Give a node that was run its children, and return them.

        probabilities: that each token is the target's; there may be fewer tokens.
        """
        node.choice = choice
        self.ran += node is not self.root
        for rank, (token, probability) in enumerate(zip(choice.tokens, probabilities, strict=False)):
            if rank == 0 or node.probability * probability >= _MIN_PROBABILITY:
                child = DraftNode(token, node.position + 1, node.probability * probability, node)
                node.children[token] = child
                heappush(self._pending, child)
        return list(node.children.values())
