"""Copies from the host to a device without waiting for the device: pinned memory, asynchronous copies.

A plain `torch.tensor(values, device="cuda")` waits for all kernels launched before.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy
import torch
from torch import Tensor

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


def copy_all(device: torch.device | str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of the CPU to a device, all at once, because each copy takes the host's time."""
    if torch.device(device).type == "cpu":
        return list(tensors)
    arrays = [tensor.numpy() for tensor in tensors]  # with NumPy, because a small operation of torch takes longer
    sizes = [-(-array.nbytes // 8) for array in arrays]
    packed = numpy.zeros(sum(sizes), dtype=numpy.int64)
    for array, end, size in zip(arrays, accumulate(sizes), sizes, strict=True):
        packed[end - size : end].view(array.dtype)[: array.size] = array.ravel()
    parts = copy_to(device, torch.from_numpy(packed)).split(sizes)
    return [_unpack(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _unpack(part: Tensor, tensor: Tensor) -> Tensor:
    """Return a view of int64 memory with the dtype and shape of a tensor. Only what is needed takes time."""
    if tensor.dtype != torch.int64:
        part = part.view(tensor.dtype)
    if len(part) != tensor.numel():
        part = part[: tensor.numel()]
    return part if tensor.dim() == 1 else part.view(tensor.shape)


def copy_into(buffer: Tensor, tensor: Tensor) -> None:
    """Overwrite a buffer on any device with a tensor of the CPU of the same dtype and number of elements."""
    if buffer.device.type == "cuda":
        tensor = tensor.pin_memory()
    buffer.copy_(tensor.view_as(buffer), non_blocking=True)
