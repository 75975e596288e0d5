"""Copies from the host to a device without waiting for the device: pinned memory, asynchronous copies.

A plain `torch.tensor(values, device="cuda")` waits for all kernels launched before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def tensor_on(device: torch.device | str, values: Values, dtype: torch.dtype) -> Tensor:
    """Return the values as a tensor on a device."""
    return copy_to(device, torch.tensor(values, dtype=dtype))


def copy_to(device: torch.device | str, tensor: Tensor) -> Tensor:
    """Copy a tensor of the CPU to a device."""
    if torch.device(device).type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_into(buffer: Tensor, tensor: Tensor) -> None:
    """Overwrite a buffer on any device with a tensor of the CPU of the same dtype and number of elements."""
    if buffer.device.type == "cuda":
        tensor = tensor.pin_memory()
    buffer.copy_(tensor.view_as(buffer), non_blocking=True)
