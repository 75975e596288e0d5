"""The coupled sampler: argmax(processed logits + shared Gumbel noise), an exact sample of their softmax.

Greedy decoding is the same rule without noise. Logits need no normalisation. Works on a flat batch of N positions of
any rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from decoding.sampling.history import History, Position
from decoding.sampling.noise import gumbel, noise_key
from decoding.sampling.processors import DISTRIBUTION, Stage
from decoding.sampling.shaping import Shaping, needs_shaping
from decoding.sampling.transfer import tensor_on


@dataclass(slots=True, eq=False)
class _Needs:
    """Sorts positions by what they need: A need more than an argmax, S of them are random."""

    active: list[int] = field(default_factory=list)  # [A] positions
    shaped: list[int] = field(default_factory=list)  # [P] indices in 0…A−1
    sampled: list[int] = field(default_factory=list)  # [S] indices in 0…A−1
    keys: list[tuple[int, int]] = field(default_factory=list)  # [S]
    settings: list[list[tuple[int, float]]] = field(default_factory=lambda: [[] for _ in DISTRIBUTION])

    def add(self, start: int, history: History, positions: Sequence[Position]) -> None:
        """Add the positions of one request. start: the number of positions before them."""
        params, are_shaped = history.params, needs_shaping(history, positions)
        if params.greedy and not any(are_shaped):
            return
        sampled_before = len(self.sampled)
        for row, (position, is_shaped) in enumerate(zip(positions, are_shaped, strict=True), start):
            if is_shaped:
                self.shaped.append(len(self.active))
            if not params.greedy:
                self.sampled.append(len(self.active))
                self.keys.append(noise_key(params.seed, position.index))
            if is_shaped or not params.greedy:
                self.active.append(row)
        for processor, settings in zip(DISTRIBUTION, self.settings, strict=True):
            value = getattr(params, processor.field)
            if value != processor.off and not params.greedy:
                settings.extend((index, value) for index in self.sampled[sampled_before:])


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Parameters of the A of N positions that need more than an argmax, S of them random."""

    size: int  # N
    active: Tensor  # [A] int64, positions in 0…N−1
    shaped: Tensor  # [P] int64, indices in 0…A−1
    shaping: Shaping | None  # of the P; None if P is 0
    stages: tuple[Stage, ...]  # processors of the distribution, each for some of the A
    sampled: Tensor  # [S] int64, indices in 0…A−1
    keys: Tensor  # [S, 2] int32, noise keys

    @classmethod
    def build(
        cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "SamplingBatch":
        """Build tensors on `device` from N positions. Fastest if the positions of a request are adjacent."""
        needs, start = _Needs(), 0
        for history, group in groupby(positions, attrgetter("history")):
            members = list(group)
            needs.add(start, history, members)
            start += len(members)
        to_shape = [positions[needs.active[index]] for index in needs.shaped]
        return cls(
            size=len(positions),
            active=tensor_on(device, needs.active, torch.int64),
            shaped=tensor_on(device, needs.shaped, torch.int64),
            shaping=Shaping.build(to_shape, vocab_size, device) if to_shape else None,
            stages=tuple(p.stage(rows, device) for p, rows in zip(DISTRIBUTION, needs.settings, strict=True) if rows),
            sampled=tensor_on(device, needs.sampled, torch.int64),
            keys=tensor_on(device, needs.keys, torch.int32).reshape(-1, 2),
        )


def process(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the target distribution's logits, [N, V] float32. logits: [N, V] of any float type.

    On greedy positions only bias, penalties and constraints act. If no position is active, the result may share memory
    with the logits.
    """
    if not len(batch.active):
        return logits.float()
    return _merge(logits.float(), batch, _process(logits, batch))


def probabilities(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the target distribution, [N, V] float32; one-hot if greedy. logits: [N, V] of any float type."""
    processed = process(logits, batch)
    if len(batch.sampled) == batch.size:
        return processed.softmax(dim=-1)
    one_hot = torch.zeros_like(processed).scatter_(-1, processed.argmax(dim=-1, keepdim=True), 1.0)
    random = batch.active[batch.sampled]
    return one_hot.index_copy_(0, random, processed[random].softmax(dim=-1))


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample one token per position, [N] int64. logits: [N, V] of any float type."""
    if not len(batch.active):
        return logits.argmax(dim=-1)
    chosen = _scores(logits, batch).argmax(dim=-1)
    return chosen if len(chosen) == batch.size else logits.argmax(dim=-1).index_copy_(0, batch.active, chosen)


def rank(logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor]:
    """Rank tokens by the scores of which `sample` takes the maximum: a draft token and its alternatives.

    logits: [N, V] of any float type, V ≥ count. Returns [N, count] int64 tokens, best first, and [N, count] float32
    scores; −∞ for tokens that the parameters forbid.
    """
    scores = logits.float()
    if len(batch.active):
        scores = _merge(scores, batch, _scores(logits, batch))
    best = scores.topk(count, dim=-1)
    return best.indices, best.values


def _merge(logits: Tensor, batch: SamplingBatch, active: Tensor) -> Tensor:
    """Return the logits, [N, V], with the rows of active positions replaced. active: [A, V]."""
    return active if len(active) == batch.size else logits.index_copy(0, batch.active, active)


def _process(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the processed logits of the active positions, [A, V] float32. logits: [N, V]."""
    processed = (logits if len(batch.active) == batch.size else logits[batch.active]).float()
    if batch.shaping is not None:
        all_shaped = len(batch.shaped) == len(processed)
        changed = batch.shaping(processed if all_shaped else processed[batch.shaped])
        processed = changed if all_shaped else processed.index_copy(0, batch.shaped, changed)
    for stage in batch.stages:
        processed = stage(processed)
    return processed


def _scores(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the processed logits of the active positions, plus noise if any, [A, V] float32. logits: [N, V]."""
    processed = _process(logits, batch)
    if not len(batch.sampled):
        return processed
    noise = gumbel(batch.keys, logits.shape[-1])  # [S, V]
    return noise.add_(processed) if len(noise) == len(processed) else processed.index_add(0, batch.sampled, noise)
