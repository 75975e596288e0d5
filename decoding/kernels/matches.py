"""An index of texts that finds where the end of another one occurred in them, in C++."""

import weakref
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from decoding.kernels.native import library

_BREAK = array("i", [-1])
NODE_BYTES = 20  # of memory for each token


def can_index() -> bool:
    """Whether there can be an index on this machine."""
    return library() is not None


class Match(NamedTuple):
    """The longest match of a text's end."""

    length: int  # 0: there is none
    end: int  # how many tokens were added up to the end of the newest such match
    following: list[int]


class MatchIndex:
    """The last tokens of texts. Only one thread may add at a time, and none may search meanwhile."""

    def __init__(self, window: int, depth: int) -> None:
        """
        window: the most tokens; older ones are forgotten. Memory is taken as they come.
        depth: how many tokens are compared; of positions after the same ones, only the newest is kept.

        Raises MemoryError if there is too little.
        """
        native = library()
        assert native is not None
        made = native.matches_make(window + 1, depth)
        if not made:
            raise MemoryError(f"there is no room for an index of {window} tokens")
        self._native, self._made, self._depth, self._window = native, made, depth, window
        self._added = 0
        weakref.finalize(self, native.matches_free, made)

    def __len__(self) -> int:
        return min(self._added, self._window)

    def add(self, tokens: Sequence[int], owner: int = 0) -> None:
        """Append tokens to the last text. owner: 32 bits; a search finds only texts of the same one."""
        self._added += len(tokens)
        values = array("i", tokens)
        self._native.matches_add(self._made, owner, values.buffer_info()[0], len(values))

    def end_text(self, owner: int = 0) -> None:
        """End a text. Nothing follows it."""
        self.add(_BREAK, owner)

    def find(self, tokens: Sequence[int], count: int = 0, owner: int = 0) -> Match:
        """Find the end of a text. count: how many tokens that follow the match are wanted at most."""
        text, copy, result = array("i", tokens[-self._depth :]), array("i", bytes(4 * count)), array("q", bytes(24))
        pointers = copy.buffer_info()[0], result.buffer_info()[0]
        self._native.matches_find(self._made, owner, text.buffer_info()[0], len(text), count, *pointers)
        length, end, copied = result
        return Match(length, end, copy[:copied].tolist())
