"""An EAGLE-3 head's forward over tokens that its target has run, as CUDA graphs: one for each number of tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from decoding.sampling.transfer import copy_into
from engine.heads.eagle3 import Eagle3Head
from engine.heads.eagle3_chain import LayerForward
from engine.model.forward_input import RowInput
from engine.model.graph_recorder import GraphRecorder, Replay, graph_sizes, record_largest_first
from engine.model.ragged_batch import PackedInputs, pack_inputs, padding_row

_MAX_TOKENS = 1024


class Eagle3Reader:
    """Runs a head over new tokens, and keeps its output after each text's last one."""

    def __init__(
        self, head: Eagle3Head, layer: LayerForward, recorder: GraphRecorder, states: Tensor, *, most_tokens: int
    ) -> None:
        """
        states: [slots + 1, H], where the outputs are kept; the last slot is for padding.
        most_tokens: of the largest usual step.
        """
        self._head, self._layer, self._recorder, self._states = head, layer, recorder, states
        self._slots = len(states) - 1
        self._sizes = token_counts(most_tokens)
        self._features = states.new_zeros(self._sizes[-1], head.feature_size)
        self._recorded: dict[int, tuple[PackedInputs, Replay]] = {}  # by number of tokens

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record all graphs, so that no request waits for them. The layer must have pages."""
        padding = [padding_row(self._slots)]
        self._sizes = record_largest_first(self._sizes, lambda count: self._load(count, padding, [0]))

    def can_run(self, tokens: int) -> bool:
        """Whether there is a graph for so many tokens."""
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
        outputs = self._layer(self._head.fc(self._features[:count]), tokens, positions, batch)  # [N, H]
        return self._states.index_copy_(0, batch.slots, outputs.index_select(0, batch.offsets[1:] - 1))


def token_counts(most_tokens: int) -> list[int]:
    """Return the numbers of tokens that have graphs."""
    return graph_sizes(min(most_tokens, _MAX_TOKENS))
