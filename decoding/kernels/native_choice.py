"""The fused choice of tokens on CPUs, in C++."""

import torch
from torch import Tensor

from decoding.kernels.native import library


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
