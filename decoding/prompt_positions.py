"""The positions of a shortened prompt's tokens in the whole one. Without torch: the command line reads these, too."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise

import msgspec

from decoding.errors import require


class PromptPositions(msgspec.Struct, frozen=True):
    """The kept tokens' positions. Text after the prompt continues at position `length`.

    Raises InvalidRequestError if the positions don't ascend, or are not the whole prompt's.
    """

    kept: Sequence[int]  # of each token of the shortened prompt, ascending
    length: int  # tokens of the whole prompt

    def __post_init__(self) -> None:
        ascending = all(first < second for first, second in pairwise(self.kept))
        inside = bool(self.kept) and self.kept[0] >= 0 and self.kept[-1] < self.length
        expected = f"ascending whole numbers from 0 to {self.length - 1}, at least one"
        require(ascending and inside, "positions", list(self.kept[:8]), expected)

    @property
    def removed(self) -> int:
        """Tokens that the shortened prompt lacks."""
        return self.length - len(self.kept)

    @property
    def digest(self) -> str:
        """A short text that differs for other positions."""
        return blake2b(repr((tuple(self.kept), self.length)).encode(), digest_size=16).hexdigest()

    def translate(self, positions: Iterable[int]) -> list[int]:
        """Return positions in the whole text of tokens at these positions of the shortened one."""
        count = len(self.kept)
        return [self.kept[index] if index < count else index + self.removed for index in positions]
