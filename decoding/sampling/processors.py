"""Logits processors that shape the distribution, vectorised over rows with different settings.

Each function takes logits [N, V] float32 and one setting per row, and equals transformers' processor of the same name
on every row. It changes nothing in place and keeps at least one token.

Sums of probabilities decide what stays, and a float's last bit depends on the order of a sum. So probabilities are
integers here, whose sums are the same on every device: see `weights`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.sampling.transfer import tensor_on

_NEG_INF = float("-inf")
_LOG2_E = 1.4426950408889634
# 2^f for f in [0, 1], from the constant up; within 1e-7, and exactly 1 and 2 at the ends.
_POWER_OF_2 = (
    *(1.0, float.fromhex("0x1.62e42cp-1"), float.fromhex("0x1.ebfd58p-3"), float.fromhex("0x1.c68912p-5")),
    *(float.fromhex("0x1.3d0b92p-7"), float.fromhex("0x1.46d64cp-10"), float.fromhex("0x1.c54176p-13")),
)
_ONE = 2.0**40  # the weight of the most probable token
_SLACK = 2.0**-25  # a sum of probabilities that misses p by less than this has reached it
_FIRST_CANDIDATES = 1024  # most nuclei have fewer tokens


def weights(logits: Tensor) -> Tensor:
    """Return probabilities relative to the most probable token's, which is 2⁴⁰; [N, V] int64, rounded down.

    Every step is one IEEE operation on float32 or exact, so all devices agree to the bit, if none fuses a product with
    a sum.
    """
    largest = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    exponent = ((logits - largest) * _LOG2_E).clamp_(min=-63.0)  # [N, V]
    whole = exponent.floor()
    fraction = exponent.sub_(whole)
    mantissa = torch.full_like(fraction, _POWER_OF_2[-1])
    for coefficient in reversed(_POWER_OF_2[:-1]):
        mantissa.mul_(fraction).add_(coefficient)
    return (mantissa.mul_(2.0**23).long() << 17) >> whole.neg_().long()  # the product is a whole number


def temperature(logits: Tensor, values: Tensor) -> Tensor:
    """Divide by the temperature. values: [N]; 0: off, for greedy rows."""
    return logits / values.float().masked_fill(values == 0, 1.0)[:, None]


def top_k(logits: Tensor, values: Tensor, largest: int | None = None) -> Tensor:
    """Keep the k largest logits and ties with the k-th. values: [N]; 0: off. largest: at least the largest k, if known.

    Fan et al., arXiv 1805.04833, section 5.3.
    """
    bound = min(largest or logits.shape[-1], logits.shape[-1])
    best = logits.topk(bound, dim=-1).values  # [N, bound]
    threshold = best.gather(-1, values.long().clamp(1, bound)[:, None] - 1)  # [N, 1]
    return logits.masked_fill((logits < threshold) & (values > 0)[:, None], _NEG_INF)


def top_p(logits: Tensor, values: Tensor) -> Tensor:
    """Keep the smallest set of most probable tokens whose probabilities sum to p. values: [N] float64; 1: off.

    Among equally probable tokens the later ones stay. Nucleus sampling, Holtzman et al., arXiv 1904.09751, section 3.1.
    The most probable token always stays.
    """
    total = weights(logits).sum(dim=-1)  # [N]
    dropped = ((1.0 - values.double() + _SLACK) * total.double()).long()
    wanted = (total - dropped).clamp_(min=1)[:, None]  # the weight before the next token at which the set is complete
    best, kept = _nucleus(logits, wanted, values)
    threshold = best.gather(-1, kept - 1)  # [N, 1]
    ties = kept - (best > threshold).sum(dim=-1, keepdim=True)  # those that stay
    is_tie = logits == threshold
    ties_from_here = is_tie.int().flip(-1).cumsum(dim=-1).flip(-1)
    stays = (logits > threshold) | (is_tie & (ties_from_here <= ties)) | (values == 1)[:, None]
    return logits.masked_fill(~stays, _NEG_INF)


def _nucleus(logits: Tensor, wanted: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logits, [N, M], best first, and how many of them stay, [N, 1], fewer than M or all."""
    vocab_size = logits.shape[-1]
    # Whether a few suffice is known to the host only, so a GPU, which must not wait for it, sorts them all.
    bound = min(_FIRST_CANDIDATES, vocab_size) if logits.device.type == "cpu" else vocab_size
    while True:
        best = logits.topk(bound, dim=-1).values if bound < vocab_size else logits.sort(descending=True).values
        weight = weights(best)
        kept = (weight.cumsum(dim=-1) - weight < wanted).sum(dim=-1, keepdim=True)
        if bound == vocab_size or bool(((kept < bound)[:, 0] | (values == 1)).all()):
            return best, kept
        bound = vocab_size


def min_p(logits: Tensor, values: Tensor) -> Tensor:
    """Keep tokens at least p times as probable as the most probable one. values: [N]; 0: off.

    Nguyen et al., arXiv 2407.01082, section 3.
    """
    return logits.masked_fill(weights(logits) < (values.double() * _ONE)[:, None], _NEG_INF)


def typical_p(logits: Tensor, values: Tensor) -> Tensor:
    """Keep the tokens whose information is nearest to the entropy, until their probabilities sum to p.

    Ties with the last of them stay. values: [N] float32, below 1. Locally typical sampling, Meister et al.,
    arXiv 2202.00666, section 4.
    """
    log_probs = logits.log_softmax(dim=-1)
    entropy = -_reduced(torch.nansum, log_probs * log_probs.exp())
    distance = (-log_probs - entropy).abs()
    nearest, order = distance.sort(dim=-1)
    cumulative = logits.gather(-1, order).softmax(dim=-1).cumsum(dim=-1)
    last = (cumulative < values[:, None]).sum(dim=-1, keepdim=True).clamp_(max=logits.shape[-1] - 1)
    return logits.masked_fill(distance > nearest.gather(-1, last), _NEG_INF)


def epsilon_cutoff(logits: Tensor, values: Tensor) -> Tensor:
    """Keep tokens of at least this probability, and the most probable. values: [N] float32.

    Epsilon sampling, Hewitt et al., arXiv 2210.15191, section 4.2.
    """
    return _keep_probable(values[:, None], logits.softmax(dim=-1), logits)


def eta_cutoff(logits: Tensor, values: Tensor) -> Tensor:
    """Keep tokens of at least min(ε, √ε · exp(−entropy)) probability, and the most probable. values: [N] float32, ε.

    Eta sampling, Hewitt et al., arXiv 2210.15191, section 4.3.
    """
    log_probs = logits - _reduced(torch.logsumexp, logits)
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
    entropy = -_reduced(torch.sum, finite * log_probs.softmax(dim=-1))[:, 0]
    threshold = torch.minimum(values, values.sqrt() * (-entropy).exp())
    return _keep_probable(threshold[:, None], logits.softmax(dim=-1), logits)


def _reduced(function: Callable[..., Tensor], rows: Tensor) -> Tensor:
    """Return a function of each row, [N, 1]. rows: [N, V].

    A row is never alone: torch would share its sum out among threads, and add in another order than among other rows.
    """
    return function(rows if len(rows) > 1 else rows.expand(2, -1), dim=-1, keepdim=True)[: len(rows)]


def _keep_probable(threshold: Tensor, probs: Tensor, logits: Tensor) -> Tensor:
    """Remove tokens below the threshold, [N, 1], but never the most probable. probs, logits: [N, V]."""
    improbable = (probs < threshold) & (logits < logits.amax(dim=-1, keepdim=True))
    return logits.masked_fill(improbable, _NEG_INF)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A rare processor for M of the N rows of a batch."""

    function: Callable[[Tensor, Tensor], Tensor]
    rows: Tensor  # [M] int64, in 0…N−1
    values: Tensor  # [M] float32

    @classmethod
    def build(
        cls,
        function: Callable[[Tensor, Tensor], Tensor],
        settings: Sequence[tuple[int, float]],
        device: torch.device | str,
    ) -> "Stage":
        """Build from M pairs (row, setting), rows ascending."""
        rows, values = zip(*settings, strict=True)
        return cls(function, tensor_on(device, rows, torch.int64), tensor_on(device, values, torch.float32))

    def __call__(self, logits: Tensor) -> Tensor:
        """Process logits, [N, V] float32; returns the same shape."""
        if len(self.rows) == len(logits):
            return self.function(logits, self.values)
        return logits.index_copy(0, self.rows, self.function(logits[self.rows], self.values))


# In the order of transformers' `generate`; the common ones come first.
COMMON = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
RARE = {"typical_p": typical_p, "epsilon_cutoff": epsilon_cutoff, "eta_cutoff": eta_cutoff}


def log_add(first: Tensor, second: Tensor) -> Tensor:
    """Return log(exp(first) + exp(second)), of their common shape. −∞: impossible.

    `torch.logaddexp` computes the last numbers of a tensor, or of a thread's part, by other functions than the rest.
    """
    larger = torch.maximum(first, second)
    total = larger + (-(first - second).abs()).exp().log1p()
    return torch.where(larger == -torch.inf, larger, total)
