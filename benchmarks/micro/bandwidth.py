"""The minimum time to read a model's weights once: a lower bound for a decoding step of few tokens."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Floor:
    """Size of the weights, measured bandwidths, and the resulting lower bound."""

    weight_bytes: int
    copy_bytes_per_s: float  # read and written by a large copy
    gemv_bytes_per_s: float  # read by a product of a large matrix and a vector

    @property
    def step_s(self) -> float:
        """The minimum time of a step, at the higher of both bandwidths."""
        return self.weight_bytes / max(self.copy_bytes_per_s, self.gemv_bytes_per_s)


def measure_floor(model: PreTrainedModel, *, buffer_bytes: int) -> Floor:
    """Measure on the model's device in its dtype. Tied weights count once. buffer_bytes: far above the cache size."""
    dtype, device = model.dtype, model.device
    width = 8192
    matrix = torch.zeros(buffer_bytes // dtype.itemsize // width, width, dtype=dtype, device=device)
    copy, vector = torch.empty_like(matrix), torch.zeros(width, dtype=dtype, device=device)
    return Floor(
        weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        copy_bytes_per_s=2 * matrix.nbytes / _least_s(lambda: copy.copy_(matrix), device),
        gemv_bytes_per_s=matrix.nbytes / _least_s(lambda: matrix.mv(vector), device),
    )


def _least_s(operation: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of several rounds."""
    seconds = []
    for _ in range(_ROUNDS):
        _wait(device)
        began_s = time.perf_counter()
        operation()
        _wait(device)
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
