"""Copies from the host to a device without waiting for the device: pinned memory, asynchronous copies.

A plain `torch.tensor(values, device="cuda")` waits for all kernels launched before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes
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
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    for part, tensor in zip(packed.split(sizes), tensors, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
    parts = copy_to(device, packed).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]


def copy_into(buffer: Tensor, tensor: Tensor) -> None:
    """Overwrite a buffer on any device with a tensor of the CPU of the same dtype and number of elements."""
    if buffer.device.type == "cuda":
        tensor = tensor.pin_memory()
    buffer.copy_(tensor.view_as(buffer), non_blocking=True)
