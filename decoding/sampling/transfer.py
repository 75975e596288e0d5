"""Values from the host to a device, without waiting for it: pinned memory, asynchronous copies.

A plain `torch.tensor(values, device="cuda")` waits for all kernels launched before.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

_DTYPES = {"bool": torch.bool, "float32": torch.float32, "int32": torch.int32}
Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def tensor_on(device: torch.device | str, values: Values, dtype: torch.dtype) -> Tensor:
    """Return the values as a tensor on a device."""
    return copy_to(device, torch.tensor(values, dtype=dtype))


def copy_to(device: torch.device | str, tensor: Tensor) -> Tensor:
    """Copy a tensor of the CPU to a device."""
    if not tensor.numel():
        return torch.empty_like(tensor, device=device)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_all(device: torch.device | str, arrays: Sequence[numpy.ndarray]) -> list[Tensor]:
    """Copy arrays to a device, all at once, because each copy takes the host's time, as does each small tensor."""
    if torch.device(device).type == "cpu":
        return [*map(torch.from_numpy, arrays)]
    sizes = [-(-part.nbytes // 8) for part in arrays]
    packed = numpy.zeros(sum(sizes), dtype=numpy.int64)
    for part, end, size in zip(arrays, accumulate(sizes), sizes, strict=True):
        packed[end - size : end].view(part.dtype)[: part.size] = part.ravel()
    parts = copy_to(device, torch.from_numpy(packed)).split(sizes)
    return [*map(_unpack, parts, arrays)]


def _unpack(part: Tensor, array: numpy.ndarray) -> Tensor:
    """Return a view of int64 memory with the dtype and shape of an array. Only what is needed takes time."""
    if array.dtype != numpy.int64:
        part = part.view(_DTYPES[array.dtype.name])
    if len(part) != array.size:
        part = part[: array.size]
    return part if array.ndim == 1 else part.view(array.shape)


def copy_into(buffer: Tensor, tensor: Tensor) -> None:
    """Overwrite a buffer on any device with a tensor of the CPU of the same dtype and number of elements."""
    if buffer.device.type == "cuda":
        tensor = tensor.pin_memory()
    buffer.copy_(tensor.view_as(buffer), non_blocking=True)


class TokenSet:
    """Tokens that a request names for many positions, with a value for each of them or for none."""

    def __init__(self, tokens: Iterable[int], values: Iterable[float] = ()) -> None:
        self._tokens = _as_tensor(array("q", tokens), torch.int64)
        self._values = _as_tensor(array("f", values), torch.float32)
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


def _as_tensor(values: "array[int] | array[float]", dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
