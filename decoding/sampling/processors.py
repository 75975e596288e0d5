"""Logits processors that shape the distribution, vectorised over rows with different settings.

Each function takes logits [N, V] float32 and one setting per row, and equals transformers' processor of the same name
on every row. It changes nothing in place and keeps at least one token. Rows for which it is off are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from decoding.sampling.transfer import tensor_on

_NEG_INF = float("-inf")


def temperature(logits: Tensor, values: Tensor) -> Tensor:
    """Divide by the temperature. values: [N] float32."""
    return logits / values[:, None]


def top_k(logits: Tensor, values: Tensor, bound: int) -> Tensor:
    """Keep the k largest logits and ties with the k-th. values: [N] int64, from 1 to `bound`.

    Fan et al., arXiv 1805.04833, section 5.3.
    """
    bound = min(bound, logits.shape[-1])
    k = values.clamp(max=bound)  # [N]
    largest = logits.topk(bound, dim=-1).values  # [N, bound]
    threshold = largest.gather(-1, k[:, None] - 1)  # [N, 1]
    return logits.masked_fill(logits < threshold, _NEG_INF)


def top_p(logits: Tensor, values: Tensor) -> Tensor:
    """Keep the smallest set of most probable tokens whose probabilities sum to p. values: [N] float64, below 1.

    Nucleus sampling, Holtzman et al., arXiv 1904.09751, section 3.1. The most probable token always stays.
    """
    ascending, order = logits.sort(dim=-1)  # [N, V]
    below = ascending.softmax(dim=-1).cumsum(dim=-1)
    drop_sorted = below <= (1 - values).to(below.dtype)[:, None]  # 1 − p in float64 first, as in transformers
    drop_sorted[:, -1] = False
    drop = torch.zeros_like(drop_sorted).scatter(-1, order, drop_sorted)
    return logits.masked_fill(drop, _NEG_INF)


def min_p(logits: Tensor, values: Tensor) -> Tensor:
    """Keep tokens at least p times as probable as the most probable one. values: [N] float32, at most 1.

    Nguyen et al., arXiv 2407.01082, section 3.
    """
    probs = logits.softmax(dim=-1)
    threshold = values[:, None] * probs.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probs < threshold, _NEG_INF)


def typical_p(logits: Tensor, values: Tensor) -> Tensor:
    """Keep the tokens whose information is nearest to the entropy, until their probabilities sum to p.

    Ties with the last of them stay. values: [N] float32, below 1. Locally typical sampling, Meister et al.,
    arXiv 2202.00666, section 4.
    """
    log_probs = logits.log_softmax(dim=-1)
    entropy = -(log_probs * log_probs.exp()).nansum(dim=-1, keepdim=True)
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
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
    entropy = -(finite * log_probs.softmax(dim=-1)).sum(dim=-1)
    threshold = torch.minimum(values, values.sqrt() * (-entropy).exp())
    return _keep_probable(threshold[:, None], logits.softmax(dim=-1), logits)


def _keep_probable(threshold: Tensor, probs: Tensor, logits: Tensor) -> Tensor:
    """Remove tokens below the threshold, [N, 1], but never the most probable. probs, logits: [N, V]."""
    improbable = (probs < threshold) & (logits < logits.amax(dim=-1, keepdim=True))
    return logits.masked_fill(improbable, _NEG_INF)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A processor for M of the N rows of a batch."""

    function: Callable[[Tensor, Tensor], Tensor]
    rows: Tensor  # [M] int64, in 0…N−1
    values: Tensor  # [M]

    def __call__(self, logits: Tensor) -> Tensor:
        """Process logits, [N, V] float32; returns the same shape."""
        if len(self.rows) == len(logits):
            return self.function(logits, self.values)
        return logits.index_copy(0, self.rows, self.function(logits[self.rows], self.values))


@dataclass(frozen=True, slots=True)
class Processor:
    """One of the functions above, with the request's field that sets it."""

    field: str
    function: Callable[..., Tensor]
    off: float
    dtype: torch.dtype
    bounded: bool = False  # whether it takes the largest setting as a number, which saves a copy from the device

    def bound(self, largest: float) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function for settings up to `largest`."""
        return partial(self.function, bound=int(largest)) if self.bounded else self.function

    def stage(self, settings: Sequence[tuple[int, float]], device: torch.device | str) -> Stage:
        """Build from M pairs (row, setting), rows ascending."""
        rows, values = zip(*settings, strict=True)
        return Stage(
            self.bound(max(values)),
            tensor_on(device, rows, torch.int64),
            tensor_on(device, values, self.dtype),
        )


# In the order of transformers' `generate`.
DISTRIBUTION = (
    Processor("temperature", temperature, 1.0, torch.float32),
    Processor("top_k", top_k, 0, torch.int64, bounded=True),
    Processor("top_p", top_p, 1.0, torch.float64),
    Processor("min_p", min_p, 0.0, torch.float32),
    Processor("typical_p", typical_p, 1.0, torch.float32),
    Processor("epsilon_cutoff", epsilon_cutoff, 0.0, torch.float32),
    Processor("eta_cutoff", eta_cutoff, 0.0, torch.float32),
)
