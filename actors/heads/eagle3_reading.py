"""What an EAGLE-3 head does for tokens that its target has run, as CUDA graphs: one for each number of tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from actors.heads.eagle3 import Eagle3Head
from actors.heads.eagle3_chain import Layer
from actors.model.forward_input import RowInput
from actors.model.graph_recorder import GraphRecorder, Replay
from actors.model.ragged_batch import PackedInputs, pack_inputs, padding_row
from decoding.sampling.transfer import copy_into

_TOKENS = (2, 4, 8, 16, 32, 64, 128, 256, 512)  # of graphs


class Eagle3Reading:
    """Runs a head over new tokens, and keeps its output after each text's last one."""

    def __init__(self, head: Eagle3Head, layer: Layer, recorder: GraphRecorder, states: Tensor) -> None:
        """states: [slots + 1, H], where the outputs are kept; the last slot is for padding."""
        self._head, self._layer, self._recorder, self._states = head, layer, recorder, states
        self._slots = len(states) - 1
        self._features = states.new_zeros(_TOKENS[-1], head.feature_size)
        self._recorded: dict[int, tuple[PackedInputs, Replay]] = {}  # by number of tokens

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record all graphs, the largest first. The layer must have pages."""
        for count in reversed(_TOKENS):
            self._inputs(count, [padding_row(self._slots)], [0])

    def run(self, rows: Sequence[RowInput], chosen: Sequence[int], layers: Tensor) -> bool:
        """Read the rows' tokens, N in all. Returns whether there is a graph for so many. Pages must be there.

        chosen: [N] the tokens' rows of `layers`, [·, states · H], which holds the target's hidden states.
        """
        if len(chosen) > _TOKENS[-1]:
            return False
        count = _TOKENS[bisect_left(_TOKENS, len(chosen))]
        inputs, replay = self._inputs(count, rows, chosen)
        indices = inputs.integers[sum(inputs.sizes) :]
        self._features[:count].copy_(layers.index_select(0, indices))
        replay()
        return True

    def _inputs(self, count: int, rows: Sequence[RowInput], chosen: Sequence[int]) -> tuple[PackedInputs, Replay]:
        """Return the inputs of the graph of `count` tokens, on the device, and the graph."""
        inputs = pack_inputs(
            rows,
            row_count=min(count, self._slots) + 1,  # the last has all tokens of padding
            token_count=count,
            spare_slot=self._slots,
            rest=[*chosen, *[0] * (count - len(chosen))],
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
