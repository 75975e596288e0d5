"""Blends: how the members' logits become the logits of one target distribution.

Works on a flat batch of N positions of any rows, each with its own weights and settings. There are two rules: a mean
of probabilities, and a weighted sum of log-probabilities. The result needs no normalisation and is sampled like the
logits of a single model. Absent members have weight 0; their logits may be anything, NaN included. If all members with
a weight have the same logits and the weights sum to 1, the blend is bitwise these logits, on plausible tokens.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from decoding.blending.params import BlendParams, BlendRule
from decoding.sampling.processors import log_add
from decoding.sampling.transfer import tensor_on

_NEG_INF = float("-inf")
_MIN_LOG_PROB = -1e3  # of a token that a term with a negative weight rules out
_TIE = 1e-5  # tolerance for votes and weights that sum to 1, and for logarithms of mean probabilities
_FEW = 64  # tokens that are compared first
TokenAttribution = tuple[float, bool, float]  # log-probability, whether it was the most probable token, share
_GAP = 1e4  # between the worst candidate and all other tokens; no bias closes it


def mixture(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the members' probabilities.

    Args:
        logits: [M, N, V] float32, −∞ for tokens that a member rules out; of members with weight 0, those of another.
        weights: [M, N] float32, at least 0, with a positive sum.

    Returns:
        [N, V] float32 logits.
    """
    return _unless_equal(_log_mean(logits.log_softmax(dim=-1), weights), logits)


def majority(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the weights of the members in the majority, [M, N], 0 for the others. Shapes as for `mixture`.

    Each member votes for its most probable token, by weight. Ties go to the token with the greater mean probability,
    then to the first member. The winner is the most probable token of the mixture.
    """
    shares = _shares(weights)
    choices = logits.argmax(dim=-1)  # [M, N]
    votes = ((choices[:, None] == choices) * shares).sum(dim=1)  # [M, N] for each member's choice
    log_probs = logits.log_softmax(dim=-1).gather(-1, choices.T.expand(len(logits), -1, -1))  # [M, N, M] of each choice
    means = _log_mean(log_probs, weights).T  # [M, N]
    means = means.masked_fill((votes < votes.amax(dim=0) - _TIE) | (weights <= 0), _NEG_INF)
    leaders = (means >= means.amax(dim=0) - _TIE).int().argmax(dim=0, keepdim=True)  # [1, N] a member for each position
    return shares * (choices == choices.gather(0, leaders))


def gate(logits: Tensor, weights: Tensor, threshold: Tensor) -> Tensor:
    """Return the weights, [M, N], without those of other members where the first one is sure.

    Yu et al., arXiv 2406.12585. An absent gate is never sure. Shapes as for `mixture`; threshold: [N] float32.
    """
    sure = (weights[0] > 0) & (logits[0].log_softmax(dim=-1).amax(dim=-1) >= threshold.log())
    return torch.cat([weights[:1], weights[1:].masked_fill(sure, 0.0)])


def weighted_sum(logits: Tensor, weights: Tensor, alpha: Tensor, temperature: Tensor) -> Tensor:
    """Return the weighted sum of the terms' log-probabilities, on tokens that are plausible to the first term.

    Those have at least α of its best probability (Li et al., arXiv 2210.15097, section 3); others get −∞. A token that
    a term with a positive weight rules out is ruled out; to one with a negative weight its log-probability is −1000.
    Positions without any token left get the mixture of the terms with positive weights.

    Args:
        logits: [M, N, V] float32, −∞ for tokens that a term rules out; of terms with weight 0, those of another.
        weights: [M, N] float32, of any sign.
        alpha: [N] float32 in 0…1.
        temperature: [N] float32, of the terms with negative weights.

    Returns:
        [N, V] float32 logits.
    """
    factors = weights[:, :, None]
    log_probs = (logits / torch.where(factors < 0, temperature[:, None], 1.0)).log_softmax(dim=-1)
    least_log_probs = torch.where(factors > 0, _NEG_INF, _MIN_LOG_PROB)
    total = _total(factors * torch.maximum(log_probs, least_log_probs))
    total = _unless_equal(total, logits, (_total(weights) - 1).abs() < _TIE)
    if not _is_nowhere(alpha > 0):
        plausible = logits[0].amax(dim=-1) + alpha.log()
        total = torch.where(logits[0] < plausible[:, None], _NEG_INF, total)
    impossible = total.amax(dim=-1, keepdim=True) == _NEG_INF
    if _is_nowhere(impossible):
        return total
    return torch.where(impossible, _log_mean(log_probs, weights.clamp(min=0.0)), total)


def blend(logits: Tensor, positions: Sequence[tuple[BlendParams, Sequence[bool]]]) -> Tensor:
    """Return the target distribution's logits, [N, V] float32.

    Args:
        logits: [M, N, V] of any float type.
        positions: [N] parameters, and which of its members, the first of M or fewer, answered.

    Raises:
        InvalidRequestError: the parameters don't fit the members; the error names the field.
        UnavailableError: too few members answered.
    """
    logits, device = logits.float(), logits.device
    groups: dict[BlendRule, list[int]] = {}
    for index, (params, _) in enumerate(positions):
        groups.setdefault(params.kind, []).append(index)
    given = [(*params.member_weights(present), *[0.0] * (len(logits) - len(present))) for params, present in positions]
    weights = tensor_on(device, given, torch.float32).T.contiguous()  # [M, N], 0 where absent
    numbers = [(each.threshold, *each.contrast(present)) for each, present in positions]
    settings = tensor_on(device, numbers, torch.float32).T.contiguous()  # [3, N]
    if not all(map(all, given)):
        decides = settings[1:2] > 0  # the first member, on what is plausible
        logits = _replace_absent(logits, torch.cat([weights[:1].bool() | decides, weights[1:].bool()]))
    if len(groups) == 1:
        return _blend_alike(next(iter(groups)), logits, weights, *settings)
    blended = torch.empty_like(logits[0])
    for kind, own in groups.items():
        rows = tensor_on(device, own, torch.int64)
        blended[rows] = _blend_alike(kind, logits[:, rows], weights[:, rows], *settings[:, rows])
    return blended


def _blend_alike(kind: BlendRule, logits: Tensor, weights: Tensor, *settings: Tensor) -> Tensor:
    """Return the blend of positions of one kind. settings: threshold, alpha and temperature, [N] each."""
    threshold, alpha, temperature = settings
    match kind:
        case "single" | "mixture":
            return mixture(logits, weights)
        case "vote":
            weights = majority(logits, weights)
        case "gated":
            weights = gate(logits, weights, threshold)
        case "product" | "contrastive" | "formula":
            return weighted_sum(logits, weights, alpha, temperature)
    return mixture(_replace_absent(logits, weights != 0), weights)


def _shares(weights: Tensor) -> Tensor:
    return weights / _total(weights)


def _total(terms: Tensor) -> Tensor:
    """Return the sum over members, added in turn: the bits of torch.sum depend on N. terms: [M, N] or [M, N, V]."""
    total: Tensor = reduce(torch.add, terms)
    return total


def _replace_absent(logits: Tensor, is_present: Tensor) -> Tensor:
    """Replace the logits of absent members by those of the first that is present, [M, N, V]. is_present: [M, N]."""
    first = is_present.int().argmax(dim=0)  # [N] a member for each position
    return torch.where(is_present[:, :, None], logits, logits[first, torch.arange(len(first), device=first.device)])


def _log_mean(log_probs: Tensor, weights: Tensor) -> Tensor:
    """Return the logarithm of the weighted mean probabilities, [N, V]. log_probs: [M, N, V]; weights: [M, N]."""
    mean: Tensor = reduce(log_add, log_probs + _shares(weights).log()[:, :, None])
    return mean


def _unless_equal(blended: Tensor, logits: Tensor, is_mean: Tensor | bool = True) -> Tensor:
    """Return the blend, [N, V], or the members' logits where all are equal. logits: [M, N, V]; is_mean: [N]."""
    for width in (_FEW, logits.shape[-1]):  # most differ at once
        part = logits[:, :, :width]
        equal = (part[1:] == part[0]).all(dim=-1).all(dim=0) & is_mean
        if _is_nowhere(equal):
            return blended
    return torch.where(equal[:, None], logits[0], blended)


def _is_nowhere(flags: Tensor) -> bool:
    """Whether none is set, as far as that is known without waiting for a device."""
    return flags.device.type == "cpu" and not flags.any()


def attribute_tokens(logits: Tensor, tokens: Sequence[int], weights: Sequence[float]) -> list[list[TokenAttribution]]:
    """Compute each member's log-probability, agreement and share of each token.

    A share is weight × probability, divided by the sum over members. In a mixture it is the probability that the token
    came from the member. If all members rule the token out, shares are 0.

    Args:
        logits: [M, N, V] of any float type, before each token.
        tokens: [N]
        weights: [M]; of negative ones the size counts.

    Returns:
        [N][M]
    """
    index = torch.tensor(tokens, device=logits.device)[None, :, None].expand(len(logits), -1, 1)
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, index).squeeze(-1)  # [M, N]
    agreed = logits.argmax(dim=-1) == index.squeeze(-1)
    factors = torch.tensor(weights, device=logits.device).abs()
    shares = (own + factors.log()[:, None]).softmax(dim=0).nan_to_num(nan=0.0)
    columns = zip(own.T.tolist(), agreed.T.tolist(), shares.T.tolist(), strict=True)
    return [list(zip(*column, strict=True)) for column in columns]


def replace_empty(logits: Tensor, fallback: Tensor) -> Tensor:
    """Replace rows of a member's logits that are all −∞ by those of `fallback`. Both: [N, V]."""
    return torch.where(logits.amax(dim=-1, keepdim=True) == _NEG_INF, fallback, logits)


def top_k_union(own: Tensor, count: int, others: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return the union of each member's `count` most probable tokens, [N, V] bool (Yao et al., arXiv 2410.03777).

    own: [N, V] the leader's logits.
    others: [M − 1][N] the most probable tokens of each other member; those beyond V, its padding, don't count.
    """
    union = torch.zeros_like(own, dtype=torch.bool)
    union.scatter_(-1, own.topk(min(count, own.shape[-1]), dim=-1).indices, True)
    pairs = [
        (row, token) for best in others for row, tokens in enumerate(best) for token in tokens if token < own.shape[-1]
    ]
    if pairs:
        rows, tokens = torch.tensor(pairs, device=own.device).T
        union[rows, tokens] = True
    return union


def rank_others_below(blended: Tensor, own: Tensor, candidates: Tensor) -> Tensor:
    """Add all other tokens to a blend of candidates, far below them and in the leader's order. Each: [N, V].

    So tokens remain if a request forbids all candidates, for instance by its grammar.
    """
    least = blended.masked_fill(blended == _NEG_INF, torch.inf).amin(dim=-1, keepdim=True)
    others = least - _GAP + own - own.amax(dim=-1, keepdim=True)
    return torch.where(candidates, blended, others)
