"""The coupled sampler: argmax(processed logits + shared Gumbel noise), an exact sample of their softmax.

Greedy decoding is the same rule without noise. Logits need no normalisation. Works on a flat batch of N positions of
any rows. The functions of this file are the reference; fused ones in decoding/kernels give the same tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.kernels.choice import fused_choice
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.noise import gumbel
from decoding.sampling.params import SamplingParams
from decoding.sampling.processors import COMMON, top_k
from decoding.sampling.transfer import tensor_on

NO_TOKEN = -1  # where nothing can be chosen: the logits are no finite numbers, or the parameters forbid all tokens


@torch.inference_mode()
def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample one token per position, [N] int64, or NO_TOKEN. logits: [N, V] of any float type."""
    tokens, scores = rank(logits, batch, 1)
    if scores.is_cpu and all(map(math.isfinite, scores.flatten().tolist())):  # as nearly always; on a GPU it would wait
        return tokens[:, 0]
    return tokens.masked_fill(~scores.isfinite(), NO_TOKEN)[:, 0]


def reason_for_no_token(logits: Tensor) -> str:
    """Say why no token can be chosen. Waits for the device. logits: [V], before any parameter acts."""
    if bool(logits.isnan().any()):
        return "the model's logits are NaN"
    if bool(logits.isposinf().any()):
        return "the model's logits are infinite"
    if bool(logits.isneginf().all()):
        return "the model's logits are all minus infinity"
    return "the parameters forbid every token"


def warm_up(device: torch.device, vocab_size: int, token_ids: Tensor | None = None) -> None:
    """Sample once, so that no request waits until a kernel has been compiled. token_ids: as in `rank`."""
    position = Position(History(SamplingParams(max_tokens=1), [0], 1), [])
    batch = SamplingBatch.build([position], vocab_size, device)
    rank(torch.zeros(1, vocab_size, device=device), batch, 1, token_ids)


@torch.inference_mode()
def rank(logits: Tensor, batch: SamplingBatch, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rank tokens by the scores of which `sample` takes the maximum: a draft token and its alternatives.

    Without shaping, all shapes are fixed and nothing waits for the device, so a CUDA graph can record it.

    Args:
        logits: [N, V] of any float type, V ≥ count.
        batch: without shaping if there are `token_ids`.
        count: how many tokens to return.
        token_ids: [V] int64, rising: the tokens that the logits are of, if these are some tokens only. All others
            count as impossible.

    Returns:
        [N, count] int64 tokens, best first, the lowest id at a tie for the best, and [N, count] float32 scores; −∞ for
        tokens that the parameters forbid.
    """
    logits = logits.float().contiguous()
    if token_ids is not None:
        columns, scores = _rank(logits, batch, count, token_ids)
        return token_ids[columns], scores
    if batch.shaping is None:
        return _rank(logits, batch, count)
    with batch.shaping.applied(logits) as shaped:
        return _rank(shaped, batch, count)


def _rank(logits: Tensor, batch: SamplingBatch, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    fused = None if batch.stages else fused_choice(logits.device)
    if fused is not None:
        return fused(logits, batch.settings, count, token_ids)
    tokens, scores = _best(_scores(logits, batch, token_ids), count)
    return tokens, scores.masked_fill(~_is_sound(logits), float("-inf"))


def process(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the target distribution's logits, [N, V] float32. logits: [N, V] of any float type.

    On greedy positions only bias, penalties and constraints act. If nothing acts, the result may share memory with the
    logits.
    """
    logits = logits.float()
    return _distribution(logits if batch.shaping is None else batch.shaping(logits), batch)


def probabilities(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the target distribution, [N, V] float32; one-hot if greedy, NaN where no token can be chosen.

    logits: [N, V] of any float type.
    """
    processed = process(logits, batch)
    greedy = (batch.temperature == 0)[:, None]
    one_hot = torch.zeros_like(processed).scatter_(-1, processed.argmax(dim=-1, keepdim=True), 1.0)
    probs = torch.where(greedy, one_hot, processed.softmax(dim=-1))
    return probs.masked_fill(~_is_sound(logits), float("nan"))


def _is_sound(logits: Tensor) -> Tensor:
    """Return whether no logit of a row is NaN or ∞, and one is finite, [N, 1]. logits: [N, V]."""
    return logits.amax(dim=-1, keepdim=True).isfinite()


def _distribution(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Apply the processors of the distribution to the rows that are not greedy. logits: [N, V] float32."""
    if "temperature" not in batch.used:
        return logits
    processed = logits
    for index, (field, processor) in enumerate(COMMON.items()):
        if field in batch.used:
            values = batch.settings[:, index]
            processed = top_k(processed, values, batch.largest_k) if field == "top_k" else processor(processed, values)
    for stage in batch.stages:
        processed = stage(processed)
    return torch.where((batch.temperature == 0)[:, None], logits, processed)


def _scores(logits: Tensor, batch: SamplingBatch, token_ids: Tensor | None = None) -> Tensor:
    """Return the processed logits, plus noise where the row is not greedy, [N, V] float32. logits: [N, V] float32."""
    processed = _distribution(logits, batch)
    if "temperature" not in batch.used:
        return processed
    noisy = gumbel(batch.keys, logits.shape[-1] if token_ids is None else token_ids).add_(processed)
    return torch.where((batch.temperature == 0)[:, None], logits, noisy)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the best tokens and their scores, both [N, count]. scores: [N, V]."""
    first = scores.argmax(dim=-1, keepdim=True)  # the lowest id at a tie
    if count == 1:
        return first, scores.gather(-1, first)
    values, tokens = scores.topk(count, dim=-1)
    tokens = torch.where(tokens == first, tokens[:, :1], tokens)
    tokens[:, :1] = first
    return tokens, values


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
