"""Lists of tokens for some of P positions, collected flat and copied to a device."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.transfer import copy_to


class Entries(NamedTuple):
    """E pairs of a position and a token."""

    rows: Tensor  # [E] int64, in 0…P−1
    tokens: Tensor  # [E] int64, in 0…V−1
    values: Tensor  # [E] float32, or [0] without values


class TokenLists:
    """Collects entries."""

    def __init__(self) -> None:
        self._rows, self._tokens, self._values = array("q"), array("q"), array("f")

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, row: int, tokens: Iterable[int], values: Iterable[float] = ()) -> None:
        """Add the tokens of a position. All calls give a value per token, or none does."""
        self._tokens.extend(tokens)
        self._values.extend(values)
        self._rows.extend(array("q", [row]) * (len(self._tokens) - len(self._rows)))

    def entries(self, vocab_size: int, device: torch.device | str) -> Entries:
        """Copy to the device, without ids from `vocab_size` on: a drafter's vocabulary may be smaller."""
        entries = Entries(
            _tensor(self._rows, torch.int64), _tensor(self._tokens, torch.int64), _tensor(self._values, torch.float32)
        )
        known = entries.tokens < vocab_size
        if not known.all():
            entries = Entries(*(column[known] if len(column) else column for column in entries))
        return Entries(*(copy_to(device, column) for column in entries))


def _tensor(values: "array[int] | array[float]", dtype: torch.dtype) -> Tensor:
    """Return a tensor that shares the array's memory."""
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
