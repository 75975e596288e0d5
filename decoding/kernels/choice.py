"""The fused choice of tokens: which there is for a device, and that on CPUs, in C++."""

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor

from decoding.kernels.native import library


class Choose(Protocol):
    """From logits to tokens in one pass: temperature, top_k, top_p, min_p, noise and the largest scores.

    Equal to `rank` of decoding/sampling/sampler.py in plain torch, to the bit: scores too, but for a last bit once in
    10⁸, where two devices round a logarithm in another way.
    """

    def __call__(
        self, logits: Tensor, settings: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the best tokens, best first.

        Args:
            logits: [N, V] float32, contiguous, shaped by bias, penalties and constraints already.
            settings: [N, 6] float64 on the same device: temperature (0: greedy, the rest does not count), top_k
                (0: off), top_p (1: off), min_p (0: off), and the two int32 keys of the noise.
            count: how many tokens; at most V.
            token_ids: [V] int64, the tokens whose noise the columns get; None: 0…V−1.

        Returns:
            [N, count] int64 columns, the lowest at a tie for the best; [N, count] float32 scores, −∞ for tokens that
            top_k, top_p or min_p drop.
        """


def fused_choice(device: torch.device) -> Choose | None:
    """Return the fused choice for tensors on the device; None if there is none."""
    if device.type == "cuda":
        from decoding.kernels.triton_choice import choose  # imported where there is a GPU only

        return choose
    return choose_tokens if device.type == "cpu" and library() is not None else None


def choose_tokens(
    logits: Tensor, settings: Tensor, count: int, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do what `Choose` says, on a CPU."""
    native = library()
    assert native is not None
    rows, vocab_size = logits.shape
    settings = settings.contiguous()  # has to live during the call
    tokens = torch.empty(rows, count, dtype=torch.int64)
    scores = torch.empty(rows, count)
    native.choose_tokens(
        logits.data_ptr(),
        settings.data_ptr(),
        None if token_ids is None else token_ids.data_ptr(),
        rows,
        vocab_size,
        count,
        torch.get_num_threads(),
        tokens.data_ptr(),
        scores.data_ptr(),
    )
    return tokens, scores


class StepCall(ctypes.Structure):
    """The arguments of `choose_step`: as in choice.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "settings", "token_ids", "step")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "count", "threads")),
        *((name, ctypes.c_void_p) for name in ("next", "choices")),
    ]


def step_function() -> Any:
    """Return the function in C++ that takes a `StepCall`, on a CPU that has it."""
    native = library()
    assert native is not None
    return native.choose_step
