"""Chains of an EAGLE-3 head's draft tokens as CUDA graphs: the first token is one replay, and each further one another.

A chain's state is in memory of the device, and a replay changes it. So a graph depends on the number of rows alone.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from actors.heads.eagle3 import Eagle3Head
from actors.heads.sampling import DraftStart
from actors.model.forward_input import RowInput
from actors.model.graph_recorder import GraphRecorder, Replay
from actors.model.ragged_batch import PackedInputs, RaggedBatch, pack_inputs, padding_row
from decoding.drafts.calibration import RANKS
from decoding.drafts.choice import DraftChoice
from decoding.sampling.batch import COLUMNS, SamplingBatch, chain_settings
from decoding.sampling.sampler import rank
from decoding.sampling.transfer import copy_into, copy_to

_ROWS = (2, 4, 8, 16, 32, 64, 128, 256)  # of graphs

# From the layer's last output [B, H], tokens and positions [1, B], and the layout, to the layer's output [B, H].
Layer = Callable[[Tensor, Tensor, Tensor, RaggedBatch], Tensor]


class _State(NamedTuple):
    """The state of B rows' chains of up to C tokens."""

    inputs: PackedInputs  # of the layer; then step and settings, because each copy takes the host's time
    increments: Tensor  # int64, what each of these integers grows by from one step to the next
    step: Tensor  # [1] int64, the number of the next token
    settings: Tensor  # [C, B, 6] float64, see `SamplingBatch`
    hidden: Tensor  # [B, H], the layer's last output
    choices: Tensor  # [C, B, 2, ranks] float64: tokens, best first, and their scores


class _Replays(NamedTuple):
    first: Replay
    further: Replay


class Eagle3Chain:
    """Runs chains of a head over the slots of its target."""

    def __init__(
        self,
        head: Eagle3Head,
        layer: Layer,
        recorder: GraphRecorder,
        states: Tensor,
        *,
        length: int,
        token_ids: Tensor | None,
    ) -> None:
        """
        states: [slots + 1, H] the layer's output after each slot's last pair; the last slot is for padding.
        length: the most tokens of a chain, C.
        token_ids: as in `rank`.
        """
        self.ranks = min(RANKS, len(head.d2t))
        self._head, self._layer, self._recorder, self._states = head, layer, recorder, states
        self._slots, self._length, self._token_ids = len(states) - 1, length, token_ids
        self._recorded: dict[int, tuple[_State, _Replays]] = {}  # by number of rows

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record all graphs, so that no request waits for them; the largest first, whose memory the others share.

        The layer must have pages.
        """
        for count in reversed(_ROWS[: bisect_left(_ROWS, min(self._slots, _ROWS[-1])) + 1]):
            self._record(self._pack([], count), count)

    def can_run(self, starts: Sequence[DraftStart], ranks: int) -> bool:
        """Whether there are graphs for such chains. ranks: how many alternatives to return."""
        return len(starts) <= _ROWS[-1] and ranks == self.ranks and not any(start.params.rejects for start in starts)

    @torch.inference_mode()
    def run(self, starts: Sequence[DraftStart], length: int) -> list[list[DraftChoice]]:
        """Return each row's choices, position after position. The pages must be prepared for writing."""
        count = _ROWS[bisect_left(_ROWS, len(starts))]
        inputs = self._pack(starts, count)
        if count not in self._recorded:
            self._record(inputs, count)
        state, replays = self._recorded[count]
        copy_into(state.inputs.integers, inputs.integers)
        torch.index_select(self._states, 0, state.inputs.unpack()[2].slots, out=state.hidden)
        replays.first()
        for _ in range(length - 1):
            replays.further()
        choices = state.choices[:length].tolist()  # the only wait of the host
        return [[DraftChoice.ranked(*choices[step][row]) for step in range(length)] for row in range(len(starts))]

    def _record(self, inputs: PackedInputs, count: int) -> None:
        """Record the steps of `count` rows."""
        state = self._state(inputs, count)
        first, further = partial(self._choose, state), partial(self._advance, state)
        self._recorded[count] = state, _Replays(self._recorder.record(first), self._recorder.record(further))

    def _choose(self, state: _State) -> Tensor:
        """Choose a token of each row, and let it be the layer's next input. Return the state's choices."""
        settings = state.settings.index_select(0, state.step)[0]
        logits = self._head.logits(state.hidden)
        tokens, scores = rank(logits, SamplingBatch(settings), self.ranks, self._token_ids)
        choices = torch.stack([tokens.double(), scores.double()], dim=1)  # both fit exactly
        state.choices.index_copy_(0, state.step, choices[None])
        state.inputs.unpack()[0][0].copy_(tokens[:, 0])
        return state.choices

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
        """Return the state at the first step, in memory of its own."""
        device = self._states.device
        integers = copy_to(device, inputs.integers).clone()
        _, step, settings = integers.split([sum(inputs.sizes), 1, len(integers) - 1 - sum(inputs.sizes)])
        increments = PackedInputs(torch.zeros_like(integers), inputs.sizes)
        increments.integers[sum(inputs.sizes)] = 1
        _, _, layout = increments.unpack()
        for part in (layout.lengths, layout.columns, layout.positions, layout.trunks):
            part.fill_(1)
        return _State(
            inputs=PackedInputs(integers, inputs.sizes),
            increments=increments.integers,
            step=step,
            settings=settings.view(torch.float64).view(self._length, count, len(COLUMNS)),
            hidden=self._states.new_zeros(count, self._states.shape[1]),
            choices=torch.empty(self._length, count, 2, self.ranks, dtype=torch.float64, device=device),
        )
