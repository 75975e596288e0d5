"""Several continuations of one text as a tree of tokens. Common prefixes are stored once."""

from collections.abc import Sequence

from decoding.drafts.draft import Draft


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
