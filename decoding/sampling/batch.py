"""What the sampler must know of the positions of a batch, as tensors on the device of the logits.

Built once a step. Must not know where the positions come from.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter

import numpy
import torch
from torch import Tensor

from decoding.sampling.history import History, Position, Positions
from decoding.sampling.noise import noise_keys
from decoding.sampling.params import SamplingParams
from decoding.sampling.processors import COMMON, RARE, Stage
from decoding.sampling.shaping import Shaping, is_shaped, never_needs_shaping
from decoding.sampling.transfer import copy_to

COLUMNS = (*COMMON, "first key", "second key")


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The settings of N positions."""

    # [N, 6] float64, a column for each of COLUMNS. Temperature 0: greedy, then the others do not count. Off: top_k 0,
    # top_p 1, min_p 0. The keys of the noise are int32, which float64 holds exactly.
    settings: Tensor
    used: frozenset[str] = frozenset(COMMON)  # common processors that act anywhere; "temperature": any row is random
    largest_k: int | None = None  # of any row; None: not known
    stages: tuple[Stage, ...] = ()  # rare processors
    shaping: Shaping | None = None  # processors that depend on the text; None: none acts

    @property
    def temperature(self) -> Tensor:
        """[N] float64; 0: greedy."""
        return self.settings[:, 0]

    @property
    def keys(self) -> Tensor:
        """[N, 2] int32, the noise keys."""
        return self.settings[:, -2:].int()

    @classmethod
    def build(
        cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "SamplingBatch":
        """Build from N positions, those of a request adjacent."""
        requests = (list(group) for _, group in groupby(positions, attrgetter("history")))
        return cls.of(list(map(Positions.gather, requests)), vocab_size, device)

    @classmethod
    def of(cls, requests: Sequence[Positions], vocab_size: int, device: torch.device | str = "cpu") -> "SamplingBatch":
        """Build from the positions of requests, N in all."""
        params = [request.history.params for request in requests]
        random = [p for p in params if not p.greedy]
        return cls(
            settings=_settings(requests, device),
            used=used_processors(params),
            largest_k=max((p.top_k for p in random), default=0),
            stages=tuple(_stages(requests, device)) if any(map(has_rare_processors, random)) else (),
            shaping=Shaping.build(requests, vocab_size, device) if any(map(is_shaped, requests)) else None,
        )


_OFF = {field: SamplingParams.__dataclass_fields__[field].default for field in (*COMMON, *RARE)}


def used_processors(rows: Iterable[SamplingParams]) -> frozenset[str]:
    """Return the common processors that act on any row; "temperature" if any is random."""
    random = [params for params in rows if not params.greedy]
    used = {field for field in ("top_k", "top_p", "min_p") if any(getattr(p, field) != _OFF[field] for p in random)}
    return frozenset(used | ({"temperature"} if random else set()))


def can_chain(params: SamplingParams) -> bool:
    """Whether all that decides on a token is in a row of `chain_settings` and the logits."""
    return not (params.rejects or params.structure or has_rare_processors(params)) and never_needs_shaping(params)


def chain_settings(rows: Sequence[tuple[SamplingParams, int]], length: int, count: int) -> Tensor:
    """Return the settings of successive positions, [length, count, 6] float64, on the CPU.

    Args:
        rows: parameters, and the position of the first token to sample; others up to `count` are padding.
    """
    settings = numpy.zeros((length, count, len(COLUMNS)))
    if rows:
        histories = [History(params, [], 0) for params, _ in rows]
        streams = numpy.array([history.stream_key for history in histories], dtype=numpy.uint32)  # [B, 2]
        firsts = numpy.array([first for _, first in rows], dtype=numpy.uint32)
        positions = numpy.arange(length, dtype=numpy.uint32)[:, None] + firsts  # [length, B]
        settings[:, : len(rows), :-2] = [history.settings for history in histories]
        settings[:, : len(rows), -2:] = noise_keys(numpy.tile(streams, (length, 1)), positions.ravel()).reshape(
            length, -1, 2
        )
    return torch.from_numpy(settings)


def has_rare_processors(params: SamplingParams) -> bool:
    """Whether the distribution is shaped by more than the columns of a batch's settings say."""
    return params.typical_p != 1 or params.epsilon_cutoff != 0 or params.eta_cutoff != 0


def _settings(requests: Sequence[Positions], device: torch.device | str) -> Tensor:
    """Return the settings of N positions, [N, 6] float64. Greedy requests need no copy to the device."""
    counts = [len(request.depths) for request in requests]
    histories = [request.history for request in requests]
    if all(history.params.greedy for history in histories):
        return torch.zeros(sum(counts), len(COLUMNS), dtype=torch.float64, device=device)
    streams = [(*history.stream_key, len(history.tokens)) for history in histories]  # [B, 3]
    noises = numpy.array(streams, dtype=numpy.uint32).repeat(counts, axis=0)  # [N, 3]
    depths = list(chain.from_iterable(request.depths for request in requests))
    settings = numpy.empty((len(depths), len(COLUMNS)))
    settings[:, :-2] = numpy.array([history.settings for history in histories]).repeat(counts, axis=0)
    settings[:, -2:] = noise_keys(noises[:, :2], noises[:, 2] + numpy.array(depths, dtype=numpy.uint32))
    return copy_to(device, torch.from_numpy(settings))


def _stages(requests: Sequence[Positions], device: torch.device | str) -> Iterator[Stage]:
    """Yield the rare processors that act on any of the positions."""
    params = [request.history.params for request in requests for _ in request.depths]
    for field, function in RARE.items():
        values = [(row, getattr(p, field)) for row, p in enumerate(params) if not p.greedy]
        values = [(row, value) for row, value in values if value != _OFF[field]]
        if values:
            yield Stage.build(function, values, device)
