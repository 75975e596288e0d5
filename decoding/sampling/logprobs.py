"""Log-probabilities of tokens under the model's own distribution, before logits processors."""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from decoding.sampling.transfer import tensor_on


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of a token, given the tokens before it.

    A long prompt has very many, which the garbage collector needs not look through.
    """

    token: int
    logprob: float
    rank: int  # 1: the most probable
    top: tuple[tuple[int, float], ...]  # the most probable tokens and their log-probabilities, best first


def token_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of tokens, and of the most probable alternatives.

    Args:
        logits: [N, V] of any float type, after the text before each token.
        tokens: [N]
        counts: [N] numbers of most probable tokens to return.
    """
    if not len(tokens):
        return []
    logprobs = logits.float().log_softmax(dim=-1)  # [N, V]
    own = logprobs.gather(-1, tensor_on(logits.device, tokens, torch.int64)[:, None])  # [N, 1]
    ranks = (logprobs > own).sum(dim=-1) + 1
    best = logprobs.topk(min(max(counts), logits.shape[-1]), dim=-1)
    columns = zip(
        tokens, own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist(), counts, strict=True
    )
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, rank, ids, values, count in columns
    ]
