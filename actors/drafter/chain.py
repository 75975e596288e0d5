"""Chains of several draft tokens per row, run without a round trip to the host for each token.

On a GPU a step is one graph that changes the chains' state on the device; a chain of n tokens is n replays.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.drafts.choices import RANKS, ChainChoices, DraftChoice
from decoding.sampling.batch import chain_settings, used_processors
from decoding.sampling.params import SamplingParams
from decoding.sampling.processors import COMMON
from decoding.sampling.transfer import copy_into, copy_to
from engine.kernels.attention import MAX_BRANCHES, RaggedBatch
from engine.model.cuda import Replay, graph_sizes, record_largest_first
from engine.model.cuda_graphs import MAX_ROWS
from engine.model.ragged_batch import RowInput, pack_inputs, padding_row
from engine.model.runner import Runner

# Tokens of one chain: a target may be waiting for the first, and a verdict may end the chain at any time. On a CPU, the
# rest of a turn takes a fifth of a step (docs/experiments.md); on a GPU it should be more.
_MAX_LENGTH_ON_GPU, _MAX_LENGTH_ON_CPU = 5, 3
_PARTS = 8  # of `_State.rows`


class ChainStart(NamedTuple):
    """The start of a row's chain."""

    run: RowInput  # the first token; later ones are written to the columns after it
    params: SamplingParams  # `can_chain` is true of them
    position: int  # in the text, the position after the first token


class _State(NamedTuple):
    """The state of B rows' chains of up to C tokens: views of one tensor, because each copy takes the host's time."""

    packed: Tensor  # int64, all but the choices
    rows: Tensor  # [8, B] int64: tokens, slots, trunks, positions, columns, lengths, branches, adapters
    chosen: ChainChoices

    @classmethod
    def of(cls, packed: Tensor, count: int) -> "_State":
        step, rows, settings = packed.split([1, _PARTS * count, len(packed) - 1 - _PARTS * count])
        return cls(packed, rows.view(_PARTS, count), ChainChoices.from_packed(step, settings, count, RANKS))


class DraftChain:
    """Runs chains of a model over its slots."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._max_length = _MAX_LENGTH_ON_CPU if runner.recorder is None else _MAX_LENGTH_ON_GPU
        # Rows of graphs. A chain has none for states, because the host plans those before each forward.
        self._sizes = [] if runner.has_states else graph_sizes(min(runner.cache.slots, MAX_ROWS))
        self._recorded: dict[tuple[int, bool], tuple[_State, Replay]] = {}  # by number of rows, and if they are adapted

    def length(self, wanted: int, last_position: int, rows: int) -> int:
        """Return how many of the wanted steps to run as one chain; 0: no chain, take a single step.

        last_position: the last position that any row would reach. rows: the number of rows.
        """
        if not wanted or not self._runner.single_device or rows > max(self._sizes, default=0):
            return 0
        reach = self._runner.reach
        if reach is not None and (reach.in_chunks or reach.size < MAX_BRANCHES) and last_position >= reach.size:
            return 0
        # In chains of about the same length.
        return math.ceil(wanted / math.ceil(wanted / self._max_length))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record all graphs, so that no request waits for them."""
        if self._runner.recorder is not None:
            self._sizes = record_largest_first(self._sizes, self._record_padding)

    @torch.inference_mode()
    def run(self, starts: Sequence[ChainStart], length: int) -> list[list[DraftChoice]]:
        """Return each row's choices after its first token, after the best of these, and so on.

        Raises OutOfPagesError as in `Runner.logits`.
        """
        self._runner.cache.prepare_writes((run.slot, run.start, run.end + length - 1) for run, _, _ in starts)
        adapted = any(run.adapter for run, _, _ in starts)
        if self._runner.recorder is None:
            state = _State.of(copy_to(self._runner.device, self._pack(starts, len(starts))), len(starts))
            used = used_processors(start.params for start in starts)
            replay: Replay = partial(self._step, state, used, adapted=adapted)
        else:
            count = self._sizes[bisect_left(self._sizes, len(starts))]
            packed = self._pack(starts, count)
            if (count, adapted) not in self._recorded:
                self._record(packed, count, adapted=adapted)
            state, replay = self._recorded[count, adapted]
            copy_into(state.packed, packed)
        for _ in range(length):
            replay()
        return state.chosen.read(len(starts), length)  # the only wait of the host

    def _record_padding(self, count: int) -> None:
        for adapted in (False,) if self._runner.lora is None else (False, True):
            self._record(self._pack([], count), count, adapted=adapted)

    def _record(self, packed: Tensor, count: int, *, adapted: bool) -> None:
        assert self._runner.recorder is not None
        state = _State.of(copy_to(self._runner.device, packed).clone(), count)
        step = partial(self._step, state, frozenset(COMMON), adapted=adapted)
        self._recorded[count, adapted] = state, self._runner.recorder.record(step)

    def _step(self, state: _State, used: frozenset[str], *, adapted: bool) -> Tensor:
        """Choose a token of each row on the device, and let it be the next step's input. Return all choices.

        Nothing here may depend on values that the host would have to read. used: processors that some row needs.
        """
        tokens, slots, trunks, positions, columns, lengths, branches, adapters = state.rows  # [B]
        offsets = torch.arange(len(slots) + 1, device=slots.device)
        layout = (slots, offsets, lengths, slots[:0], columns, positions, offsets[:-1], trunks, branches, branches)
        inputs = tokens[None], positions[None], RaggedBatch(*layout), adapters if adapted else None
        logits = self._runner.forward(*inputs)  # [B, V]
        tokens.copy_(state.chosen.choose(logits, used))
        state.rows[3:6] += 1
        branches |= 1 << (columns - trunks)  # a token also sees the chain before it, and itself
        state.chosen.step.add_(1)
        return state.chosen.choices

    def _pack(self, starts: Sequence[ChainStart], count: int) -> Tensor:
        """Return what the first step reads, on the CPU; rows up to `count` are padding."""
        rows = [*(start.run for start in starts), *[padding_row(self._runner.cache.slots)] * (count - len(starts))]
        tokens, positions, batch = pack_inputs(rows).unpack()
        adapters = torch.tensor([row.adapter for row in rows])
        layout = batch.trunks, positions[0], batch.columns, batch.lengths, batch.branches
        parts = tokens[0], batch.slots, *layout, adapters
        settings = chain_settings([start[1:] for start in starts], self._max_length, count)
        return torch.cat([torch.zeros(1, dtype=torch.int64), *parts, settings.view(torch.int64).flatten()])
