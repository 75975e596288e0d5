"""Several continuations of one text as a tree, in which what they begin with alike is there once."""

from collections.abc import Sequence

from decoding.drafts import Draft


class TokenTree:
    """Its nodes are numbered in the order in which they came, so parents come first."""

    def __init__(self) -> None:
        self.draft = Draft([], [])
        self._places: dict[tuple[int, int], int] = {}  # by parent, −1 for the root, and token

    def __len__(self) -> int:
        return len(self.draft.tokens)

    def size_with(self, tokens: Sequence[int]) -> int:
        """How many nodes there would be with another continuation."""
        return len(self) + len(tokens) - len(self.find(tokens))

    def add(self, tokens: Sequence[int]) -> int:
        """Make sure that the continuation is there. Returns where its last token is."""
        path = self.find(tokens)
        for token in tokens[len(path) :]:
            parent = path[-1] if path else -1
            path.append(len(self))
            self._places[parent, token] = path[-1]
            self.draft.tokens.append(token)
            self.draft.parents.append(parent)
        return path[-1]

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Where the first of the tokens are, as many of them as are there."""
        path: list[int] = []
        for token in tokens:
            place = self._places.get((path[-1] if path else -1, token))
            if place is None:
                break
            path.append(place)
        return path
