"""A chain head's recorded calls: its forward over tokens that the target has run, and its chains of draft tokens.

They are CUDA graphs on a GPU, and native calls on a CPU. Reading has a recording for each number of tokens. Chains have
one of the first token and one of a further token, for each number of rows: a chain's state is in memory of the device,
and a replay changes it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from decoding.drafts.choices import RANKS, ChainChoices, DraftChoice
from decoding.kernels.choice import step_function
from decoding.sampling.batch import chain_settings
from decoding.sampling.transfer import copy_into, copy_to
from engine.heads.proposer import ChainHead, DraftStart
from engine.kernels.attention import RaggedBatch
from engine.kernels.native import call_function, is_recording
from engine.model.cuda import Replay, record_largest_first
from engine.model.ragged_batch import PackedInputs, RowInput, pack_inputs, padding_row

# From the layer's last output [B, H], tokens and positions [1, B], and the layout, to the layer's output [B, H].
LayerForward = Callable[[Tensor, Tensor, Tensor, RaggedBatch], Tensor]


class Recorder(Protocol):
    """A `GraphRecorder` or a `CallRecorder`."""

    @property
    def error(self) -> Exception | None: ...
    def record(self, run: Replay, /) -> Replay: ...


class _State(NamedTuple):
    """The state of B rows' chains."""

    inputs: PackedInputs  # of the layer; then the step and settings, because each copy takes the host's time
    increments: Tensor  # int64, what each of these integers grows by from one step to the next
    hidden: Tensor  # [B, H], the layer's last output
    chosen: ChainChoices


class _Replays(NamedTuple):
    first: Replay
    further: Replay


class ChainGraphs:
    """Runs chains of a head over the slots of its target."""

    def __init__(
        self,
        head: ChainHead,
        layer: LayerForward,
        recorder: Recorder,
        states: Tensor,
        *,
        sizes: Sequence[int],
        length: int,
        token_ids: Tensor | None,
    ) -> None:
        """
        states: [slots + 1, H] the layer's output after each slot's last pair; the last slot is for padding.
        sizes: the numbers of rows that are recorded; others are padded.
        length: the most tokens of a chain.
        token_ids: as in `rank`.
        """
        self._head, self._layer, self._recorder, self._states = head, layer, recorder, states
        self._slots, self._length, self._token_ids = len(states) - 1, length, token_ids
        self._ranks, self._sizes = min(RANKS, head.outputs), sizes
        self._recorded: dict[int, tuple[_State, _Replays]] = {}  # by number of rows

    @torch.inference_mode()
    def warm_up(self, most: int) -> None:
        """Record sizes up to `most`, so that no request waits for them. The layer must have pages."""
        few, rest = _split(self._sizes, most)
        self._sizes = [*record_largest_first(few, self._record), *rest]

    def prepare(self, rows: int) -> int:
        """Record chains of so many rows if they were not yet. Returns the number with padding."""
        count = self._sizes[bisect_left(self._sizes, rows)]
        if count not in self._recorded:
            self._record(count)
        return count

    def can_run(self, starts: Sequence[DraftStart], length: int, ranks: int) -> bool:
        """Whether such chains can be recorded, of texts that don't use rejection sampling.

        ranks: how many alternatives to return.
        """
        return len(starts) <= max(self._sizes, default=0) and length <= self._length and ranks == self._ranks

    def run(self, starts: Sequence[DraftStart], length: int) -> list[list[DraftChoice]]:
        """Return each row's choices, position after position. The pages must be prepared for writing."""
        count = self.prepare(len(starts))
        state, replays = self._recorded[count]
        inputs = self._pack(starts, count)
        copy_into(state.inputs.integers, inputs.integers)
        torch.index_select(self._states, 0, state.inputs.unpack()[2].slots, out=state.hidden)
        replays.first()
        for _ in range(length - 1):
            replays.further()
        return state.chosen.read(len(starts), length)  # the only wait of the host

    def _record(self, count: int) -> None:
        state = self._state(self._pack([], count), count)
        first, further = partial(self._choose, state), partial(self._advance, state)
        self._recorded[count] = state, _Replays(self._recorder.record(first), self._recorder.record(further))

    def _choose(self, state: _State) -> Tensor:
        """Choose a token of each row, and let it be the layer's next input. Return all choices."""
        logits, tokens = self._head.logits(state.hidden), state.inputs.unpack()[0][0]
        if is_recording():
            call_function(step_function(), state.chosen.native_call(logits, tokens, self._token_ids))
        else:
            tokens.copy_(state.chosen.choose(logits, token_ids=self._token_ids))
        return state.chosen.choices

    def _advance(self, state: _State) -> Tensor:
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
        _, positions, layout = increments.unpack()
        for part in (positions, layout.lengths, layout.columns, layout.positions, layout.trunks):
            part.fill_(1)
        return _State(
            inputs=PackedInputs(integers, inputs.sizes),
            increments=increments.integers,
            hidden=self._states.new_zeros(count, self._states.shape[1]),
            chosen=ChainChoices.from_packed(step, settings, count, self._ranks),
        )


def _split(sizes: Sequence[int], most: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the sizes up to `most`, and the others."""
    few = bisect_right(sizes, most)
    return sizes[:few], sizes[few:]


class ReadingGraphs:
    """Runs a head over new tokens, and keeps its output after each text's last one."""

    def __init__(
        self, head: ChainHead, layer: LayerForward, recorder: Recorder, states: Tensor, *, sizes: Sequence[int]
    ) -> None:
        """
        states: [slots + 1, H], where the outputs are kept; the last slot is for padding.
        sizes: the numbers of tokens that are recorded; others are padded.
        """
        self._head, self._layer, self._recorder, self._states = head, layer, recorder, states
        self._slots, self._sizes = len(states) - 1, sizes
        self._features = states.new_zeros(self._sizes[-1], head.feature_size)
        self._recorded: dict[int, tuple[PackedInputs, Replay]] = {}  # by number of tokens

    @torch.inference_mode()
    def warm_up(self, most: int) -> None:
        """Record sizes up to `most`, so that no request waits for them. The layer must have pages."""
        few, rest = _split(self._sizes, most)
        padding = [padding_row(self._slots)]
        self._sizes = [*record_largest_first(few, lambda count: self._load(count, padding, [0])), *rest]

    def can_run(self, tokens: int) -> bool:
        """Whether so many tokens can be recorded."""
        return tokens <= max(self._sizes, default=0)

    def run(self, rows: Sequence[RowInput], layers_rows: Sequence[int], layers: Tensor) -> None:
        """Read the rows' tokens, N in all. The pages must be there.

        layers_rows: [N] the tokens' rows of `layers`, [·, features], which holds the target's hidden states.
        """
        count = self._sizes[bisect_left(self._sizes, len(layers_rows))]
        inputs, replay = self._load(count, rows, layers_rows)
        indices = inputs.integers[sum(inputs.sizes) :]
        self._features[:count].copy_(layers.index_select(0, indices))
        replay()

    def _load(self, count: int, rows: Sequence[RowInput], layers_rows: Sequence[int]) -> tuple[PackedInputs, Replay]:
        """Copy the rows to the inputs of the graph of `count` tokens. Returns these and the graph."""
        inputs = pack_inputs(
            rows,
            row_count=min(count, self._slots) + 1,  # the last has all tokens of padding
            token_count=count,
            spare_slot=self._slots,
            rest=[*layers_rows, *[0] * (count - len(layers_rows))],
        )
        if count not in self._recorded:
            buffers = inputs.copy_to(self._states.device)
            self._recorded[count] = buffers, self._recorder.record(partial(self._read, buffers, count))
        buffers, replay = self._recorded[count]
        copy_into(buffers.integers, inputs.integers)
        return buffers, replay

    def _read(self, inputs: PackedInputs, count: int) -> Tensor:
        tokens, positions, batch = inputs.unpack()
        outputs = self._layer(self._head.layer_input(self._features[:count]), tokens, positions, batch)  # [N, H]
        return self._states.index_copy_(0, batch.slots, outputs.index_select(0, batch.offsets[1:] - 1))
