"""Counts what operators on a device read and write: every argument once, every result once, views nothing.

A kernel that goes over its data several times, as a sort does, counts once, so sums are lower bounds. Storages have
categories, and functions that stand for one kernel are declared (`one_kernel`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

ACTIVATIONS = "activations"
# From a function's result and arguments to the bytes that it reads and that it writes, by category.
CountBytes = Callable[..., tuple[Mapping[str, int], Mapping[str, int]]]

_ONE_KERNEL = {aten.rms_norm.default, aten.linear.default, aten.silu.default}  # torch may show them in parts
# Operators that read or write as many elements as they select, not all of a store.
_SELECTING = {aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default}
_OVERWRITING = {
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten.index_copy_.default,
    aten.scatter_.src,
    aten.scatter_.value,
}
_WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.equal.default}
_FREE = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}


@dataclass
class Traffic:
    """What has been counted."""

    read: Counter[str] = field(default_factory=Counter)  # bytes by category
    written: Counter[str] = field(default_factory=Counter)
    kernels: int = 0
    to_device: int = 0  # copies from the host
    to_host: int = 0
    waits: int = 0  # of the host for the device
    to_device_bytes: int = 0
    to_host_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.read.total() + self.written.total()

    def add(self, other: "Traffic") -> None:
        self.read.update(other.read)
        self.written.update(other.written)
        for name in ("kernels", "to_device", "to_host", "waits", "to_device_bytes", "to_host_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Meter(TorchDispatchMode):
    """Counts the operators on the `meta` device that run within it."""

    def __init__(self, categorise: Callable[[Tensor], str]) -> None:
        """categorise: returns a tensor's category."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()
        self._categorise = categorise
        self._muted = False

    @contextmanager
    def one_kernel(self, owner: object, name: str, count: CountBytes) -> Iterator[None]:
        """Count each call of `owner.name` as one kernel, whatever it does."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            muted, self._muted = self._muted, True
            try:
                result = original(*args, **kwargs)
            finally:
                self._muted = muted
            if not muted:
                self.traffic.kernels += 1
                read, written = count(result, *args, **kwargs)
                self.traffic.read.update(read)
                self.traffic.written.update(written)
            return result

        with patch.object(owner, name, call):
            yield

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._muted and function not in _ONE_KERNEL:
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = function(*args, **kwargs)
        if not self._muted:
            self._count(function, args, kwargs, result)
        return result

    def _count(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        given, made = _tensors((args, kwargs)), _tensors(result)
        if not any(tensor.is_meta for tensor in (*given, *made)) or function in _FREE:
            return
        traffic = self.traffic
        if function in _WAITING:
            traffic.waits += 1
            traffic.to_host += 1
            traffic.to_host_bytes += sum(_size(tensor) for tensor in given)
            return
        copied = _copied(function, args, result)
        if copied is not None and copied[0].device != copied[1].device:
            if copied[0].is_meta:
                traffic.to_host += 1
                traffic.waits += 1
                traffic.to_host_bytes += _size(copied[0])
            else:
                traffic.to_device += 1
                traffic.to_device_bytes += _size(copied[0])
            return
        mutated = [
            args[index]
            for index, argument in enumerate(function._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and index < len(args)
        ]
        made = [tensor for tensor in made if not _shares(tensor, given)]
        if not mutated and not made:
            return  # a view
        traffic.kernels += 1
        self._add_bytes(function, args, given, made, mutated)

    def _add_bytes(
        self, function: Any, args: Sequence[Any], given: list[Tensor], made: list[Tensor], mutated: list[Tensor]
    ) -> None:
        read, written = self.traffic.read, self.traffic.written
        if function in _SELECTING:
            category = self._categorise(args[0])
            read[category] += sum(_size(tensor) for tensor in made)
            written[category] += sum(_size(tensor) for tensor in made)
            given = [tensor for tensor in given if tensor is not args[0]]
            made = []
        elif function in _OVERWRITING:
            given = [tensor for tensor in given if tensor is not args[0]]
            written[self._categorise(args[0])] += max((_size(value) for value in given), default=0)
        else:
            for tensor in (*made, *mutated):
                written[self._categorise(tensor)] += _size(tensor)
            if function in (aten.copy_.default, aten.fill_.Scalar, aten.zero_.default):
                given = [tensor for tensor in given if all(tensor is not target for target in mutated)]
        for tensor in given:
            read[self._categorise(tensor)] += _size(tensor)


def _copied(function: Any, args: Sequence[Any], result: Any) -> tuple[Tensor, Tensor] | None:
    if function is aten.copy_.default:
        return args[1], args[0]
    if function is aten._to_copy.default:
        return args[0], result
    return None


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor's distinct elements."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.element_size()


def storage(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor and its views."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _shares(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(storage(tensor) == storage(other) for other in others)
