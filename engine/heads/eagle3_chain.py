"""Chains of an EAGLE-3 head's draft tokens as CUDA graphs: one of the first token, and one of a further token.

A chain's state is in memory of the device, and a replay changes it. So a graph depends on the number of rows alone.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.drafts.calibration import RANKS
from decoding.drafts.chain_choices import ChainChoices
from decoding.drafts.choice import DraftChoice
from decoding.sampling.batch import chain_settings
from decoding.sampling.transfer import copy_into, copy_to
from engine.heads.eagle3 import Eagle3Head
from engine.heads.sampling import DraftStart
from engine.model.cuda_graphs import MAX_ROWS
from engine.model.forward_input import RowInput
from engine.model.graph_recorder import GraphRecorder, Replay, graph_sizes, record_largest_first
from engine.model.ragged_batch import PackedInputs, RaggedBatch, pack_inputs, padding_row

# From the layer's last output [B, H], tokens and positions [1, B], and the layout, to the layer's output [B, H].
LayerForward = Callable[[Tensor, Tensor, Tensor, RaggedBatch], Tensor]


class _State(NamedTuple):
    """The state of B rows' chains."""

    inputs: PackedInputs  # of the layer; then the step and settings, because each copy takes the host's time
    increments: Tensor  # int64, what each of these integers grows by from one step to the next
    hidden: Tensor  # [B, H], the layer's last output
    chosen: ChainChoices


class _Replays(NamedTuple):
    first: Replay
    further: Replay


class Eagle3Chain:
    """Runs chains of a head over the slots of its target."""

    def __init__(
        self,
        head: Eagle3Head,
        layer: LayerForward,
        recorder: GraphRecorder,
        states: Tensor,
        *,
        length: int,
        token_ids: Tensor | None,
    ) -> None:
        """
        states: [slots + 1, H] the layer's output after each slot's last pair; the last slot is for padding.
        length: the most tokens of a chain.
        token_ids: as in `rank`.
        """
        self._head, self._layer, self._recorder, self._states = head, layer, recorder, states
        self._slots, self._length, self._token_ids = len(states) - 1, length, token_ids
        self._ranks = min(RANKS, len(head.d2t))
        self._sizes = row_counts(self._slots)
        self._recorded: dict[int, tuple[_State, _Replays]] = {}  # by number of rows

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record all graphs, so that no request waits for them. The layer must have pages."""
        self._sizes = record_largest_first(self._sizes, lambda count: self._record(self._pack([], count), count))

    def can_run(self, starts: Sequence[DraftStart], length: int, ranks: int) -> bool:
        """Whether there are graphs for such chains, of texts that don't use rejection sampling.

        ranks: how many alternatives to return.
        """
        return len(starts) <= max(self._sizes, default=0) and length <= self._length and ranks == self._ranks

    def run(self, starts: Sequence[DraftStart], length: int) -> list[list[DraftChoice]]:
        """Return each row's choices, position after position. The pages must be prepared for writing."""
        count = self._sizes[bisect_left(self._sizes, len(starts))]
        inputs = self._pack(starts, count)
        if count not in self._recorded:
            self._record(inputs, count)
        state, replays = self._recorded[count]
        copy_into(state.inputs.integers, inputs.integers)
        torch.index_select(self._states, 0, state.inputs.unpack()[2].slots, out=state.hidden)
        replays.first()
        for _ in range(length - 1):
            replays.further()
        return state.chosen.read(len(starts), length)  # the only wait of the host

    def _record(self, inputs: PackedInputs, count: int) -> None:
        """Record the steps of `count` rows."""
        state = self._state(inputs, count)
        first, further = partial(self._choose, state), partial(self._advance, state)
        self._recorded[count] = state, _Replays(self._recorder.record(first), self._recorder.record(further))

    def _choose(self, state: _State) -> Tensor:
        """Choose a token of each row, and let it be the layer's next input. Return all choices."""
        tokens = state.chosen.choose(self._head.logits(state.hidden), token_ids=self._token_ids)
        state.inputs.unpack()[0][0].copy_(tokens)
        return state.chosen.choices

    def _advance(self, state: _State) -> Tensor:
        """Run the layer over the tokens that were chosen, then choose the next ones."""
        state.hidden.copy_(self._layer(state.hidden, *state.inputs.unpack()))
        state.inputs.integers.add_(state.increments)
        return self._choose(state)

    def _pack(self, starts: Sequence[DraftStart], count: int) -> PackedInputs:
        """Return what the first step reads, on the CPU; rows up to `count` are padding."""
        rows = [RowInput(start.slot, start.length - 1, [0]) for start in starts]
        inputs = pack_inputs([*rows, *[padding_row(self._slots)] * (count - len(rows))], rest=[0])
        settings = chain_settings([(start.params, start.length) for start in starts], self._length, count)
        return PackedInputs(torch.cat([inputs.integers, settings.view(torch.int64).flatten()]), inputs.sizes)

    def _state(self, inputs: PackedInputs, count: int) -> _State:
        """Return the state before the first step, in memory of its own."""
        integers = copy_to(self._states.device, inputs.integers).clone()
        _, step, settings = integers.split([sum(inputs.sizes), 1, len(integers) - 1 - sum(inputs.sizes)])
        increments = PackedInputs(torch.zeros_like(integers), inputs.sizes)
        increments.integers[sum(inputs.sizes)] = 1
        _, _, layout = increments.unpack()
        for part in (layout.lengths, layout.columns, layout.positions, layout.trunks):
            part.fill_(1)
        return _State(
            inputs=PackedInputs(integers, inputs.sizes),
            increments=increments.integers,
            hidden=self._states.new_zeros(count, self._states.shape[1]),
            chosen=ChainChoices.from_packed(step, settings, count, self._ranks),
        )


def row_counts(slots: int) -> list[int]:
    """Return the numbers of rows that have graphs."""
    return graph_sizes(min(slots, MAX_ROWS))
