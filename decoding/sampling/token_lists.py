"""Tokens with values for the positions of a batch, as tensors on a device. Must not know what they are for.

`TokenLists` gathers tokens that change from position to position; `TokenSet` holds those that a request names once.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.sampling.transfer import copy_to


class Entries(NamedTuple):
    """E pairs of a position and a token, with or without values."""

    rows: Tensor  # [E] int64, in 0…P−1
    tokens: Tensor  # [E] int64, in 0…V−1
    values: Tensor  # [E] float32, or [0] without values


class TokenLists:
    """Collects the entries of a batch."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._values: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, row: int, tokens: Iterable[int], values: Iterable[float] = ()) -> None:
        """Add the tokens of a position. Either every call gives a value for each token, or no call gives any."""
        self._tokens += tokens
        self._values += values
        self._rows += [row] * (len(self._tokens) - len(self._rows))

    def entries(self, vocab_size: int) -> Entries:
        """Return the entries on the CPU, without ids from `vocab_size` on: a drafter's vocabulary may be smaller."""
        entries = Entries(
            torch.tensor(self._rows, dtype=torch.int64),
            torch.tensor(self._tokens, dtype=torch.int64),
            torch.tensor(self._values, dtype=torch.float32),
        )
        known = entries.tokens < vocab_size
        if not known.all():
            entries = Entries(*(column[known] if len(column) else column for column in entries))
        return entries


class TokenSet:
    """Tokens that a request names for many positions, with a value for each of them or for none."""

    def __init__(self, tokens: Iterable[int], values: Iterable[float] = ()) -> None:
        self._tokens = _tensor(array("q", tokens), torch.int64)
        self._values = _tensor(array("f", values), torch.float32)
        self._copies: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def __bool__(self) -> bool:
        return self._tokens.numel() > 0

    def copy_to(self, device: torch.device | str, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return [E] int64 tokens below `vocab_size`, and their values: [E] float32, or [0]. Copies are kept."""
        key = str(device), vocab_size
        if key not in self._copies:
            known = self._tokens < vocab_size
            columns = [column[known] if len(column) else column for column in (self._tokens, self._values)]
            self._copies[key] = copy_to(device, columns[0]), copy_to(device, columns[1])
        return self._copies[key]


class Span(NamedTuple):
    """Adjacent positions that have the same tokens."""

    start: int
    end: int  # the position after the last
    tokens: Tensor  # [E] int64, in 0…V−1
    values: Tensor  # [E] float32, or [0] if none were given


def find_spans(sets: Sequence[TokenSet | None], vocab_size: int, device: torch.device | str) -> Iterator[Span]:
    """Yield the spans of positions that have tokens. sets: [P]; None or an empty set: the position has none."""
    start = 0
    for tokens, group in groupby(sets):
        end = start + sum(1 for _ in group)
        if tokens:
            yield Span(start, end, *tokens.copy_to(device, vocab_size))
        start = end


def _tensor(values: "array[int] | array[float]", dtype: torch.dtype) -> Tensor:
    """Return a tensor that shares the array's memory."""
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
