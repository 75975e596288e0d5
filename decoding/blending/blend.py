"""Blends: how the members' logits become the logits of one target distribution.

Works on a flat batch of N positions of any rows, each with its own weights and settings. The result needs no
normalisation and is sampled like the logits of a single model. Absent members have weight 0; their logits may be
anything, NaN included. If all members with a weight have the same logits, the blend is bitwise these logits, except
that of `contrastive`.
"""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from decoding.blending.params import BlendParams
from decoding.sampling.processors import log_add
from decoding.sampling.transfer import tensor_on

_NEG_INF = float("-inf")
_MIN_LOG_PROB = -1e3  # of a token that the amateur rules out
_TIE = 1e-5  # tolerance for votes, which sum to 1, and for logarithms of mean probabilities
TokenAttribution = tuple[float, bool, float]  # log-probability, whether it was the most probable token, share
_GAP = 1e4  # between the worst candidate and all other tokens; no bias closes it


def mixture(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the members' probabilities.

    Args:
        logits: [M, N, V] float32, −∞ for tokens that a member rules out.
        weights: [M, N] float32, at least 0, with a positive sum; 0: the member is absent.

    Returns:
        [N, V] float32 logits.
    """
    logits = _replace_absent(logits, weights)
    return _unless_equal(_log_mean(logits.log_softmax(dim=-1), weights), logits)


def product(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the members' log-probabilities. A token that one member rules out is ruled out.

    Positions without any token left get the mixture. Shapes as for `mixture`.
    """
    logits = _replace_absent(logits, weights)
    log_probs = logits.log_softmax(dim=-1)
    weighted = (log_probs * _shares(weights)[:, :, None]).nan_to_num(nan=0.0, neginf=_NEG_INF)  # 0 · −∞ is 0
    blended = _total(weighted)
    impossible = blended.amax(dim=-1, keepdim=True) == _NEG_INF
    return _unless_equal(torch.where(impossible, _log_mean(log_probs, weights), blended), logits)


def vote(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the mixture of the members in the majority. Each member votes for its most probable token, by weight.

    Ties go to the token with the greater mean probability, then to the first member. The winner is the most probable
    token of the result. Shapes as for `mixture`.
    """
    logits = _replace_absent(logits, weights)
    shares = _shares(weights)
    choices = logits.argmax(dim=-1)  # [M, N]
    votes = ((choices[:, None] == choices) * shares).sum(dim=1)  # [M, N] for each member's choice
    log_probs = logits.log_softmax(dim=-1).gather(-1, choices.T.expand(len(logits), -1, -1))  # [M, N, M] of each choice
    means = _log_mean(log_probs, weights).T  # [M, N]
    means = means.masked_fill((votes < votes.amax(dim=0) - _TIE) | (weights <= 0), _NEG_INF)
    leaders = (means >= means.amax(dim=0) - _TIE).int().argmax(dim=0, keepdim=True)  # [1, N] a member for each position
    return mixture(logits, shares * (choices == choices.gather(0, leaders)))


def gated(logits: Tensor, weights: Tensor, threshold: Tensor) -> Tensor:
    """Return the first member's logits where it is sure, and the mixture of all elsewhere.

    Yu et al., arXiv 2406.12585. An absent gate is never sure. Shapes as for `mixture`; threshold: [N] float32.
    """
    sure = (weights[0] > 0) & ~is_unsure(logits[0], threshold)
    return torch.where(sure[:, None], logits[0], mixture(logits, weights))


def is_unsure(logits: Tensor, threshold: Tensor) -> Tensor:
    """Return where a gate's best token has a probability below the threshold, [N] bool.

    logits: [N, V] float32; threshold: [N] float32.
    """
    return logits.log_softmax(dim=-1).amax(dim=-1) < threshold.log()


def difference(expert: Tensor, amateur: Tensor, alpha: Tensor, temperature: Tensor) -> Tensor:
    """Return log expert − log amateur, on tokens that have at least α of the expert's best probability.

    Others get −∞. Contrastive decoding: Li et al., arXiv 2210.15097, section 3.

    Args:
        expert: [N, V] float32 logits.
        amateur: [N, V] float32 logits; −∞ counts as log-probability −1000.
        alpha: [N] float32 in 0…1.
        temperature: [N] float32, of the amateur.

    Returns:
        [N, V] float32.
    """
    amateur_log_probs = (amateur / temperature[:, None]).log_softmax(dim=-1).clamp(min=_MIN_LOG_PROB)
    return (expert.log_softmax(dim=-1) - amateur_log_probs).masked_fill(_implausible(expert, alpha), _NEG_INF)


def scaled(expert: Tensor, amateur: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return (1 + β) · expert logits − β · amateur logits, on the same tokens as `difference`.

    O'Brien, Lewis, arXiv 2309.09117. Shapes as for `difference`; beta: [N] float32.
    """
    least = amateur.amax(dim=-1, keepdim=True) + _MIN_LOG_PROB
    contrast = expert + beta[:, None] * (expert - torch.maximum(amateur, least))
    return contrast.masked_fill(_implausible(expert, alpha), _NEG_INF)


def blend(logits: Tensor, positions: Sequence[tuple[BlendParams, Sequence[bool]]]) -> Tensor:
    """Return the target distribution's logits, [N, V] float32.

    Args:
        logits: [M, N, V] of any float type.
        positions: [N] parameters, and which of the M members answered.

    Raises:
        InvalidRequestError: the parameters don't fit the members; the error names the field.
        UnavailableError: too few members answered.
    """
    logits, device = logits.float(), logits.device
    shares = [params.member_weights(present) for params, present in positions]
    groups: dict[str, list[int]] = {}
    for index, (params, _) in enumerate(positions):
        groups.setdefault(_blend_kind(params, shares[index]), []).append(index)
    weights = tensor_on(device, shares, torch.float32).T.contiguous()  # [M, N], 0 where absent, 1 in total
    numbers = [(each.threshold, each.alpha, each.beta, each.amateur_temperature) for each, _ in positions]
    settings = tensor_on(device, numbers, torch.float32).T.contiguous()  # [4, N]
    if len(groups) == 1:
        return _BLENDS[next(iter(groups))](logits, weights, *settings)
    blended = torch.empty_like(logits[0])
    for kind, own in groups.items():
        rows = tensor_on(device, own, torch.int64)
        blended[rows] = _BLENDS[kind](logits[:, rows], weights[:, rows], *settings[:, rows])
    return blended


# Of logits, weights, threshold, alpha, beta and the amateur's temperature.
_BLENDS: dict[str, Callable[..., Tensor]] = {
    "single": lambda logits, *_: logits[0],
    "mixture": lambda logits, weights, *_: mixture(logits, weights),
    "product": lambda logits, weights, *_: product(logits, weights),
    "vote": lambda logits, weights, *_: vote(logits, weights),
    "gated": lambda logits, weights, threshold, *_: gated(logits, weights, threshold),
    "difference": lambda logits, _, __, alpha, ___, temperature: difference(logits[0], logits[1], alpha, temperature),
    "scaled": lambda logits, _, __, alpha, beta, ___: scaled(logits[0], logits[1], alpha, beta),
}


def _blend_kind(params: BlendParams, weights: Sequence[float]) -> str:
    """Return a key of `_BLENDS`. A contrastive blend has two forms; without its amateur it is the expert alone."""
    if params.kind != "contrastive":
        return params.kind
    return params.form if weights[1] > 0 else "single"


def _shares(weights: Tensor) -> Tensor:
    return weights / _total(weights)


def _total(terms: Tensor) -> Tensor:
    """Return the sum over members, added in turn: the bits of torch.sum depend on N. terms: [M, N] or [M, N, V]."""
    total: Tensor = reduce(torch.add, terms)
    return total


def _replace_absent(logits: Tensor, weights: Tensor) -> Tensor:
    """Replace the logits of members with weight 0 by those of the first with a weight, [M, N, V]."""
    is_present = weights > 0
    first = is_present.int().argmax(dim=0)  # [N] a member for each position
    return torch.where(is_present[:, :, None], logits, logits[first, torch.arange(len(first), device=first.device)])


def _log_mean(log_probs: Tensor, weights: Tensor) -> Tensor:
    """Return the logarithm of the weighted mean probabilities, [N, V]. log_probs: [M, N, V]; weights: [M, N]."""
    mean: Tensor = reduce(log_add, log_probs + _shares(weights).log()[:, :, None])
    return mean


def _unless_equal(blended: Tensor, logits: Tensor) -> Tensor:
    """Return the blend, [N, V], or the members' logits where all are equal. logits: [M, N, V]."""
    equal = (logits.amax(dim=0) == logits.amin(dim=0)).all(dim=-1, keepdim=True)
    return torch.where(equal, logits[0], blended)


def _implausible(expert: Tensor, alpha: Tensor) -> Tensor:
    """Return which tokens are less probable than α times the expert's best, [N, V]. expert: [N, V]; alpha: [N]."""
    best = expert.amax(dim=-1, keepdim=True)
    return (expert < best + alpha.log()[:, None]) | (expert == _NEG_INF)


def attribute_tokens(logits: Tensor, tokens: Sequence[int], weights: Sequence[float]) -> list[list[TokenAttribution]]:
    """Compute each member's log-probability, agreement and share of each token.

    A share is weight × probability, divided by the sum over members. In a mixture it is the probability that the token
    came from the member. If all members rule the token out, shares are 0.

    Args:
        logits: [M, N, V] of any float type, before each token.
        tokens: [N]
        weights: [M] at least 0.

    Returns:
        [N][M]
    """
    index = torch.tensor(tokens, device=logits.device)[None, :, None].expand(len(logits), -1, 1)
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, index).squeeze(-1)  # [M, N]
    agreed = logits.argmax(dim=-1) == index.squeeze(-1)
    scores = own + torch.tensor(weights, device=logits.device).log()[:, None]
    shares = scores.softmax(dim=0).nan_to_num(nan=0.0)
    columns = zip(own.T.tolist(), agreed.T.tolist(), shares.T.tolist(), strict=True)
    return [list(zip(*column, strict=True)) for column in columns]


def replace_empty(logits: Tensor, fallback: Tensor) -> Tensor:
    """Replace rows of a member's logits that are all −∞ by those of `fallback`. Both: [N, V]."""
    return torch.where(logits.amax(dim=-1, keepdim=True) == _NEG_INF, fallback, logits)


def top_k_union(own: Tensor, count: int, others: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return the union of each member's `count` most probable tokens, [N, V] bool (Yao et al., arXiv 2410.03777).

    Args:
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


def keep_candidates(logits: Tensor, candidates: Tensor) -> Tensor:
    """Set the logits of all tokens but the candidates to −∞. Both: [N, V]."""
    return logits.masked_fill(~candidates, _NEG_INF)


def rank_others_below(blended: Tensor, own: Tensor, candidates: Tensor) -> Tensor:
    """Add all other tokens to a blend of candidates, far below them and in the leader's order. Each: [N, V].

    So tokens remain if a request forbids all candidates, for instance by its grammar.
    """
    least = blended.masked_fill(blended == _NEG_INF, torch.inf).amin(dim=-1, keepdim=True)
    others = least - _GAP + own - own.amax(dim=-1, keepdim=True)
    return torch.where(candidates, blended, others)
