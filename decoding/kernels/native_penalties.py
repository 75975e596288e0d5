"""Penalties on the tokens of texts, in place, in C++ on CPUs."""

import torch
from torch import Tensor

from decoding.kernels.native import library


def penalise_(logits: Tensor, shape: Tensor, tokens: Tensor, counts: Tensor, settings: Tensor, total: int) -> Tensor:
    """Change logits in place. Returns the values before, [E] float32, row after row.

    Args:
        logits: [N, V] float32, contiguous.
        shape: [2, N] int64: how many of the tokens belong to each row, and the first of them.
        tokens: [U] int64
        counts: [U] float32, of each token in the answer.
        settings: [3, N] float32: repetition, frequency and presence penalty.
        total: E, the sum of shape[0].
    """
    native = library()
    assert native is not None
    before = torch.empty(total)
    native.penalise(
        logits.data_ptr(),
        *logits.shape,
        shape[0].data_ptr(),
        shape[1].data_ptr(),
        tokens.data_ptr(),
        counts.data_ptr(),
        settings.data_ptr(),
        torch.get_num_threads(),
        before.data_ptr(),
    )
    return before


def restore_(logits: Tensor, shape: Tensor, tokens: Tensor, before: Tensor) -> None:
    """Undo `penalise_`."""
    native = library()
    assert native is not None
    native.restore(
        logits.data_ptr(),
        *logits.shape,
        shape[0].data_ptr(),
        shape[1].data_ptr(),
        tokens.data_ptr(),
        torch.get_num_threads(),
        before.data_ptr(),
    )
