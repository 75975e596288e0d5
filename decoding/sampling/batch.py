"""What the sampler must know of the positions of a batch, as tensors on the device of the logits.

Built once a step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter

import numpy
import torch
from torch import Tensor

from decoding.sampling.history import History, Position, Positions
from decoding.sampling.noise_keys import noise_key, noise_keys
from decoding.sampling.params import SamplingParams
from decoding.sampling.penalties import TextTables
from decoding.sampling.processors import COMMON, RARE, Stage
from decoding.sampling.shaping import Shaping, is_shaped
from decoding.sampling.transfer import copy_to

_FEW = 16  # positions
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
        cls,
        positions: Sequence[Position],
        vocab_size: int,
        device: torch.device | str = "cpu",
        tables: TextTables | None = None,
    ) -> "SamplingBatch":
        """Build from N positions, those of a request adjacent. tables: as in `of`."""
        requests = (list(group) for _, group in groupby(positions, attrgetter("history")))
        return cls.of(list(map(Positions.gather, requests)), vocab_size, device, tables)

    @classmethod
    def of(
        cls,
        requests: Sequence[Positions],
        vocab_size: int,
        device: torch.device | str = "cpu",
        tables: TextTables | None = None,
    ) -> "SamplingBatch":
        """Build from the positions of requests, N in all.

        tables: of their texts, so that only what is new is read and copied; the next batch then invalidates this one.
        """
        traits = {request.history.traits for request in requests}
        used = frozenset[str]().union(*[each.common for each in traits])
        return cls(
            settings=_settings(requests, device, random=bool(used)),
            used=used,
            largest_k=max([each.top_k for each in traits], default=0),
            stages=tuple(_stages(requests, device)) if any(each.has_cutoffs for each in traits) else (),
            shaping=Shaping.build(requests, vocab_size, device, tables or TextTables())
            if any(map(is_shaped, requests))
            else None,
        )


_OFF = {field: SamplingParams.__dataclass_fields__[field].default for field in RARE}


def used_processors(rows: Iterable[SamplingParams]) -> frozenset[str]:
    """Return the common processors that act on any row; "temperature" if any is random."""
    return frozenset[str]().union(*[params.traits.common for params in rows])


def can_chain(params: SamplingParams) -> bool:
    """Whether all that decides on a token is in a row of `chain_settings` and the logits."""
    return not (params.rejects or params.structure or params.traits.has_cutoffs or params.traits.is_shaped)


def chain_settings(rows: Sequence[tuple[SamplingParams, int]], length: int, count: int) -> Tensor:
    """Return the settings of successive positions, [length, count, 6] float64, on the CPU.

    Args:
        rows: parameters, and the position of the first token to sample; others up to `count` are padding.
    """
    if len(rows) == count and length * count <= _FEW:
        few = [_few_settings(params, [first + step])[0] for step in range(length) for params, first in rows]
        return torch.tensor(few, dtype=torch.float64).view(length, count, len(COLUMNS))
    settings = numpy.zeros((length, count, len(COLUMNS)))
    if rows:
        own = _own_settings([History(params, [], 0) for params, _ in rows])  # [B, 6]
        streams = own[:, -2:].astype(numpy.uint32)  # [B, 2]
        firsts = numpy.array([first for _, first in rows], dtype=numpy.uint32)
        positions = numpy.arange(length, dtype=numpy.uint32)[:, None] + firsts  # [length, B]
        settings[:, : len(rows), :-2] = own[:, :-2]
        settings[:, : len(rows), -2:] = noise_keys(numpy.tile(streams, (length, 1)), positions.ravel()).reshape(
            length, -1, 2
        )
    return torch.from_numpy(settings)


def _settings(requests: Sequence[Positions], device: torch.device | str, *, random: bool) -> Tensor:
    """Return the settings of N positions, [N, 6] float64. Greedy requests need no copy to the device."""
    counts = [len(request.depths) for request in requests]
    if not random:
        return torch.zeros(sum(counts), len(COLUMNS), dtype=torch.float64, device=device)
    if sum(counts) <= _FEW:
        few = [
            _few_settings(history.params, [len(history.tokens) + depth for depth in depths])
            for history, depths, *_ in requests
        ]
        return copy_to(device, torch.tensor(list(chain.from_iterable(few)), dtype=torch.float64))
    settings = _own_settings([request.history for request in requests]).repeat(counts, axis=0)
    lengths = numpy.array([len(request.history.tokens) for request in requests], dtype=numpy.uint32)  # [B]
    depths = list(chain.from_iterable([request.depths for request in requests]))
    positions = lengths.repeat(counts) + numpy.array(depths, dtype=numpy.uint32)  # [N]
    settings[:, -2:] = noise_keys(settings[:, -2:].astype(numpy.uint32), positions)
    return copy_to(device, torch.from_numpy(settings))


def _few_settings(params: SamplingParams, positions: Iterable[int]) -> list[tuple[float, ...]]:
    """Return the settings of a request's positions. For few of them Python takes half the time of arrays."""
    common = params.temperature, params.top_k, params.top_p, params.min_p
    return [(*common, *noise_key(params.seed, position)) for position in positions]


def _own_settings(histories: Sequence[History]) -> numpy.ndarray:
    """Return what requests themselves say of their settings, [B, 6] float64: the keys are those of their streams."""
    return numpy.frombuffer(b"".join([history.settings for history in histories])).reshape(-1, len(COLUMNS))


def _stages(requests: Sequence[Positions], device: torch.device | str) -> Iterator[Stage]:
    params = [request.history.params for request in requests for _ in request.depths]
    for field, function in RARE.items():
        values = [(row, getattr(p, field)) for row, p in enumerate(params) if not p.greedy]
        values = [(row, value) for row, value in values if value != _OFF[field]]
        if values:
            yield Stage.build(function, values, device)
