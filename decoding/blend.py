"""Blends: how the members' logits become the logits of the one target distribution that is sampled from.

Works on a flat batch of N positions, whichever rows they belong to, each with weights and settings of its own. Knows
nothing of where the members run. What it returns is processed and sampled like the logits of a single model, and only
its differences along the vocabulary mean anything. Members that are absent have weight 0, and their logits may be
anything, NaN included. Where all members that count have the same logits, the blend is these logits, bit by bit
(`contrastive` alone makes something new of them).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from decoding.blend_params import BlendParams
from decoding.transfer import tensor_on

_NEG_INF = float("-inf")
_LEAST_LOG_PROB = -1e3  # what a token counts that the amateur rules out
_TIE = 1e-5  # votes, of a total of 1, and logarithms of mean probabilities, as close as this are equal


def mixture(logits: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the members' probabilities.

    Args:
        logits: [M, N, V] float32, −∞ for what a member rules out.
        weights: [M, N] float32, at least 0, with a positive sum; 0: the member is absent.

    Returns:
        [N, V] float32 logits.
    """
    logits = _counted(logits, weights)
    return _unless_equal(_log_mean(logits.log_softmax(dim=-1), weights), logits)


def product(logits: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the members' log-probabilities: a token that one of them rules out is ruled out.

    Where that leaves no token at all, the mixture. Shapes as for `mixture`.
    """
    logits = _counted(logits, weights)
    log_probs = logits.log_softmax(dim=-1)
    weighted = (log_probs * _shares(weights)[:, :, None]).nan_to_num(nan=0.0, neginf=_NEG_INF)  # 0 · −∞ counts nothing
    blended = weighted.sum(dim=0)
    impossible = blended.amax(dim=-1, keepdim=True) == _NEG_INF
    return _unless_equal(torch.where(impossible, _log_mean(log_probs, weights), blended), logits)


def vote(logits: Tensor, weights: Tensor) -> Tensor:
    """The weighted majority of the members' most probable tokens wins; at a tie the token with the greater mean
    probability, then the first member's that has such a token.

    The distribution is the mixture of those who voted for the winner, so the winner is its most probable token, and a
    sample of it is one of a member in the majority. Shapes as for `mixture`.
    """
    logits = _counted(logits, weights)
    shares = _shares(weights)
    choices = logits.argmax(dim=-1)  # [M, N]
    votes = ((choices[:, None] == choices) * shares).sum(dim=1)  # [M, N] that the choice of the member has
    log_probs = logits.log_softmax(dim=-1).gather(-1, choices.T.expand(len(logits), -1, -1))  # [M, N, M] of each choice
    means = _log_mean(log_probs, weights).T  # [M, N]
    means = means.masked_fill((votes < votes.amax(dim=0) - _TIE) | (weights <= 0), _NEG_INF)
    leaders = (means >= means.amax(dim=0) - _TIE).int().argmax(dim=0, keepdim=True)  # [1, N] a member each
    return mixture(logits, shares * (choices == choices.gather(0, leaders)))


def gated(logits: Tensor, weights: Tensor, threshold: Tensor) -> Tensor:
    """The first member's own logits where it is sure, elsewhere the mixture of all.

    Yu et al., arXiv 2406.12585. A gate of weight 0 is absent, and never sure. Shapes as for `mixture`;
    threshold: [N] float32.
    """
    sure = (weights[0] > 0) & ~is_unsure(logits[0], threshold)
    return torch.where(sure[:, None], logits[0], mixture(logits, weights))


def is_unsure(logits: Tensor, threshold: Tensor) -> Tensor:
    """[N] bool: where a gate's best token has a probability below the threshold, so that the others are needed.

    logits: [N, V] float32; threshold: [N] float32.
    """
    best = logits.amax(dim=-1) - logits.logsumexp(dim=-1)
    return best < threshold.log()


def difference(expert: Tensor, amateur: Tensor, alpha: Tensor, temperature: Tensor) -> Tensor:
    """log expert − log amateur, on tokens that have at least α of the expert's best probability; −∞ on others.

    Contrastive decoding: Li et al., arXiv 2210.15097, section 3.

    Args:
        expert: [N, V] float32 logits.
        amateur: [N, V] float32 logits. A token that it rules out counts as one with log-probability −1000.
        alpha: [N] float32 in 0…1.
        temperature: [N] float32, of the amateur.

    Returns:
        [N, V] float32.
    """
    amateur_log_probs = (amateur / temperature[:, None]).log_softmax(dim=-1).clamp(min=_LEAST_LOG_PROB)
    return (expert.log_softmax(dim=-1) - amateur_log_probs).masked_fill(_implausible(expert, alpha), _NEG_INF)


def scaled(expert: Tensor, amateur: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """(1 + β) · expert logits − β · amateur logits, on the same tokens as `difference`; β = 0 is the expert.

    O'Brien, Lewis, arXiv 2309.09117. Shapes as for `difference`; beta: [N] float32.
    """
    least = amateur.amax(dim=-1, keepdim=True) + _LEAST_LOG_PROB
    contrast = expert + beta[:, None] * (expert - torch.maximum(amateur, least))
    return contrast.masked_fill(_implausible(expert, alpha), _NEG_INF)


@dataclass(frozen=True, slots=True, eq=False)
class BlendBatch:
    """Weights and settings of N positions, and which of them are blended alike."""

    weights: Tensor  # [M, N] float32, 0 where the member is absent, 1 in total
    threshold: Tensor  # [N] float32
    alpha: Tensor  # [N] float32
    beta: Tensor  # [N] float32
    amateur_temperature: Tensor  # [N] float32
    groups: tuple[tuple[str, Tensor], ...]  # what to do, and the positions to do it with, [n] int64; they cover 0…N−1

    @classmethod
    def build(
        cls, positions: Sequence[tuple[BlendParams, Sequence[bool]]], device: torch.device | str = "cpu"
    ) -> "BlendBatch":
        """From (parameters, which of the M members answered), one per position, to tensors on `device`.

        Raises:
            InvalidRequestError: the members can't be blended as the parameters say; the error names the field.
            UnavailableError: members are absent without which there is nothing to blend.
        """
        weights = [params.member_weights(present) for params, present in positions]
        groups: dict[str, list[int]] = {}
        for i, (params, _) in enumerate(positions):
            groups.setdefault(_way(params, weights[i]), []).append(i)

        def column(values: Sequence[float]) -> Tensor:
            return tensor_on(device, values, torch.float32)

        return cls(
            weights=tensor_on(device, weights, torch.float32).T.contiguous(),
            threshold=column([params.threshold for params, _ in positions]),
            alpha=column([params.alpha for params, _ in positions]),
            beta=column([params.beta for params, _ in positions]),
            amateur_temperature=column([params.amateur_temperature for params, _ in positions]),
            groups=tuple((way, tensor_on(device, at, torch.int64)) for way, at in groups.items()),
        )

    def at(self, positions: Tensor) -> "BlendBatch":
        """Those positions alone, as if they were blended alike. positions: [n] int64."""
        return BlendBatch(
            weights=self.weights[:, positions],
            threshold=self.threshold[positions],
            alpha=self.alpha[positions],
            beta=self.beta[positions],
            amateur_temperature=self.amateur_temperature[positions],
            groups=(),
        )


def blend(logits: Tensor, batch: BlendBatch) -> Tensor:
    """The target distribution's logits, [N, V] float32, of every position; logits: [M, N, V] of any float type."""
    logits = logits.float()
    if len(batch.groups) == 1:
        return _WAYS[batch.groups[0][0]](logits, batch)
    blended = torch.empty_like(logits[0])
    for way, positions in batch.groups:
        blended[positions] = _WAYS[way](logits[:, positions], batch.at(positions))
    return blended


_WAYS: dict[str, Callable[[Tensor, BlendBatch], Tensor]] = {
    "single": lambda logits, batch: logits[0],
    "mixture": lambda logits, batch: mixture(logits, batch.weights),
    "product": lambda logits, batch: product(logits, batch.weights),
    "vote": lambda logits, batch: vote(logits, batch.weights),
    "gated": lambda logits, batch: gated(logits, batch.weights, batch.threshold),
    "difference": lambda logits, batch: difference(logits[0], logits[1], batch.alpha, batch.amateur_temperature),
    "scaled": lambda logits, batch: scaled(logits[0], logits[1], batch.alpha, batch.beta),
}


def _way(params: BlendParams, weights: Sequence[float]) -> str:
    """Which of the ways above: a contrastive blend has two forms, and none without its amateur."""
    if params.kind != "contrastive":
        return params.kind
    return params.form if weights[1] > 0 else "single"


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=0)


def _counted(logits: Tensor, weights: Tensor) -> Tensor:
    """[M, N, V], the logits with those of the first member that counts in the place of those that don't."""
    counts = weights > 0
    first = counts.int().argmax(dim=0)  # [N] a member each
    return torch.where(counts[:, :, None], logits, logits[first, torch.arange(len(first), device=first.device)])


def _log_mean(log_probs: Tensor, weights: Tensor) -> Tensor:
    """[N, V], the logarithm of the weighted mean of the probabilities; log_probs: [M, N, V], weights: [M, N]."""
    mean: Tensor = reduce(torch.logaddexp, log_probs + _shares(weights).log()[:, :, None])
    return mean


def _unless_equal(blended: Tensor, logits: Tensor) -> Tensor:
    """The blend [N, V], or the members' own logits [M, N, V] where they are the same."""
    equal = (logits.amax(dim=0) == logits.amin(dim=0)).all(dim=-1, keepdim=True)
    return torch.where(equal, logits[0], blended)


def _implausible(expert: Tensor, alpha: Tensor) -> Tensor:
    """[N, V] bool: less probable than α times the expert's best token. expert: [N, V] logits, alpha: [N]."""
    best = expert.amax(dim=-1, keepdim=True)
    return (expert < best + alpha.log()[:, None]) | (expert == _NEG_INF)
