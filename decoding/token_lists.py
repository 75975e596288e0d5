"""Lists of tokens, one or more for each of some positions, gathered flat on their way to a device."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.transfer import copy_to


class Entries(NamedTuple):
    """E pairs of a position and a token."""

    places: Tensor  # [E] int64, in 0…P−1
    tokens: Tensor  # [E] int64, in 0…V−1
    values: Tensor  # [E] float32, or [0] if none were given


class TokenLists:
    """What is to become entries."""

    def __init__(self) -> None:
        self._places, self._tokens, self._values = array("q"), array("q"), array("f")

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, place: int, tokens: Iterable[int], values: Iterable[float] = ()) -> None:
        """A position's tokens, each with a value: everywhere or nowhere."""
        self._tokens.extend(tokens)
        self._values.extend(values)
        self._places.extend(array("q", [place]) * (len(self._tokens) - len(self._places)))

    def entries(self, vocab_size: int, device: torch.device | str) -> Entries:
        """On the device, without the tokens that a vocabulary of this size lacks: a drafter's may be the smaller."""
        entries = Entries(
            _tensor(self._places, torch.int64), _tensor(self._tokens, torch.int64), _tensor(self._values, torch.float32)
        )
        known = entries.tokens < vocab_size
        if not known.all():
            entries = Entries(*(column[known] if len(column) else column for column in entries))
        return Entries(*(copy_to(device, column) for column in entries))


def _tensor(values: "array[int] | array[float]", dtype: torch.dtype) -> Tensor:
    """Shares the array's memory."""
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
