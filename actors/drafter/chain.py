"""Chains of several draft tokens per row, run without a round trip to the host for each token.

On a GPU a chain is one graph, in buckets as in actors/model/cuda_graphs.py. This module knows no trees or messages.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from actors.drafter.tree import DraftChoice
from actors.model.cuda_graphs import MAX_ROWS, rows_bucket
from actors.model.forward_input import RowInput
from actors.model.graph_recorder import Replay
from actors.model.ragged_batch import RaggedBatch, pack_inputs, padding_row
from actors.model.runner import Runner
from decoding.drafts.calibration import RANKS
from decoding.sampling.batch import SamplingBatch, chain_settings
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import rank
from decoding.sampling.transfer import copy_into, copy_to

# Tokens of one chain: a target may be waiting for the first, and a verdict may end the chain at any time. On a CPU, the
# rest of a turn takes a fifth of a step (docs/experiments.md); on a GPU it should be more.
_MAX_LENGTH_ON_GPU, _MAX_LENGTH_ON_CPU = 5, 3


class ChainStart(NamedTuple):
    """The start of a row's chain."""

    run: RowInput  # the first token; later ones are written to the columns after it
    params: SamplingParams  # `can_chain` is true of them
    position: int  # in the text, the position after the first token


class _Bucket(NamedTuple):
    """The shape of one graph: B rows, C steps."""

    rows: int
    length: int


class _Inputs(NamedTuple):
    """The inputs of one chain."""

    integers: Tensor  # [3 + 4 C, B] int64: first tokens, slots, trunks; per step positions, columns, lengths, branches
    settings: Tensor  # [C, B, 6] float64, see `SamplingBatch`


class DraftChain:
    """Runs chains of a model over its slots."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._recorded: dict[_Bucket, tuple[_Inputs, Replay]] = {}

    def length(self, wanted: int, last_position: int, rows: int) -> int:
        """Return how many of the wanted steps to run as one chain; 0: no chain, take a single step.

        last_position: the last position that any row would reach. rows: the number of rows.
        """
        runner = self._runner
        if (
            not runner.single_device
            or rows > MAX_ROWS
            or (runner.window is not None and last_position >= runner.window)
        ):
            return 0
        limit = _MAX_LENGTH_ON_CPU if runner.recorder is None else _MAX_LENGTH_ON_GPU
        return math.ceil(wanted / math.ceil(wanted / limit)) if wanted else 0  # in chains of about the same length

    def warm_up(self) -> None:
        """Record the usual graphs, so that the first requests do not wait for them."""
        cache = self._runner.cache
        counts = sorted({rows_bucket(count) for count in range(1, min(cache.slots, MAX_ROWS) + 1)})
        for count in counts if self._runner.recorder else ():
            starts = [ChainStart(RowInput(cache.slots, 0, [0]), SamplingParams(max_tokens=1), 1)] * count
            for length in range(1, _MAX_LENGTH_ON_GPU + 1):
                self.run(starts, length)

    @torch.inference_mode()
    def run(self, starts: Sequence[ChainStart], length: int) -> list[list[DraftChoice]]:
        """Return each row's choices after its first token, after the best of these, and so on.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        runner = self._runner
        runner.cache.prepare_writes((run.slot, run.start, run.end + length - 1) for run, _, _ in starts)
        count = len(starts) if runner.recorder is None else rows_bucket(len(starts))
        bucket = _Bucket(count, length)
        choices = self._replay(bucket, self._inputs(bucket, starts)).tolist()  # the only wait of the host
        return [[DraftChoice.ranked(*choices[step][row]) for step in range(length)] for row in range(len(starts))]

    def _replay(self, bucket: _Bucket, inputs: _Inputs) -> Tensor:
        """Return tokens, best first, and their scores: [C, B, 2, RANKS] float64. inputs: on the CPU."""
        runner = self._runner
        if runner.recorder is None:
            return self._steps(bucket, _Inputs(*(copy_to(runner.device, tensor) for tensor in inputs)))
        if bucket not in self._recorded:
            buffers = _Inputs(*(copy_to(runner.device, tensor).clone() for tensor in inputs))
            self._recorded[bucket] = buffers, runner.recorder.record(lambda: self._steps(bucket, buffers))
        buffers, replay = self._recorded[bucket]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            copy_into(buffer, tensor)
        return replay()

    def _steps(self, bucket: _Bucket, inputs: _Inputs) -> Tensor:
        """Run the chain on the device. Nothing here may depend on values that the host would have to read."""
        tokens, slots, trunks = inputs.integers[:3]  # [B]
        offsets = torch.arange(bucket.rows + 1, device=slots.device)
        choices = []
        for step, rows in enumerate(inputs.integers[3:].view(bucket.length, 4, -1).unbind()):
            positions, columns, lengths, branches = rows
            batch = RaggedBatch(
                slots, offsets, lengths, columns, positions, offsets[:-1], trunks, branches, window_branches=branches
            )
            logits = self._runner.forward(tokens[None], positions[None], batch)  # [B, V]
            best, scores = rank(logits, SamplingBatch(inputs.settings[step]), RANKS)
            tokens = best[:, 0]
            choices.append(torch.stack([best.double(), scores.double()], dim=1))  # both fit exactly
        return torch.stack(choices)

    def _inputs(self, bucket: _Bucket, starts: Sequence[ChainStart]) -> _Inputs:
        """Return the inputs on the CPU."""
        spare = padding_row(self._runner.cache.slots)
        rows = [*(start.run for start in starts), *[spare] * (bucket.rows - len(starts))]
        tokens, positions, batch = pack_inputs(rows).unpack()
        steps = torch.stack([positions[0], batch.columns, batch.lengths]) + torch.arange(bucket.length)[:, None, None]
        branches = [batch.branches]  # a token also sees the chain before it
        for columns in steps[1:, 1]:
            branches.append(branches[-1] | (1 << (columns - batch.trunks)))
        later = torch.cat([steps, torch.stack(branches)[:, None]], dim=1)  # [C, 4, B]
        return _Inputs(
            integers=torch.cat([tokens, batch.slots[None], batch.trunks[None], later.flatten(0, 1)]),
            settings=chain_settings([start[1:] for start in starts], bucket.length, bucket.rows),
        )
