"""CUDA graphs of a forward: a step is one launch, whatever the number of kernels in it.

A graph needs fixed shapes and addresses, so the numbers of rows and tokens are rounded up, and all inputs are copied
into one buffer. It does not depend on how long the rows are, or on how many tokens each has. Padding is written to a
slot that no request has.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.sampling.transfer import copy_into
from engine.kernels.attention import RaggedBatch, Reach
from engine.model.cuda import GraphRecorder, Replay, record_largest_first
from engine.model.kv_pages import KVPages
from engine.model.ragged_batch import PackedInputs, RowInput, pack_inputs, padding_row, token_adapters

_ROWS = (64, 256)
MAX_ROWS = _ROWS[-1]
_TOKENS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
_WANTED = 8  # tokens of a row in a usual step, its last one and a draft: so many logits have room
_GRAPH_BYTES = 2**23  # of a graph without its tensors; the whole estimate is ample (docs/experiments.md)

# From tokens, positions, layout, wanted tokens and adapters, as in `Runner`, to logits and hidden states, if any are
# kept: the last of the wanted tokens, and layers' of all tokens.
Forward = Callable[[Tensor, Tensor, RaggedBatch, Tensor, Tensor | None], tuple[Tensor, ...]]


class Shape(NamedTuple):
    """The shape of a graph: B rows that have N tokens together, and logits after W of these."""

    rows: int
    tokens: int
    wanted: int
    adapted: bool = False  # whether tokens may have adapters


class CudaGraphs:
    """A graph for each shape. All write logits to the same memory, so a result is valid until the next replay."""

    def __init__(
        self,
        forward: Forward,
        *,
        device: torch.device,
        cache: KVPages,
        vocab_size: int,
        most_tokens: int,
        reach: Reach | None = None,
        adapted: bool = False,
        recorder: GraphRecorder,
    ) -> None:
        """
        adapted: whether there are graphs for tokens with adapters, too.
        cache: its last slot is for padding.
        most_tokens: of rows together in a usual step; larger ones run without a graph.
        reach: of the layers that have one.
        """
        self._forward, self._device, self._reach, self._recorder = forward, device, reach, recorder
        self._cache = cache
        self._shapes = sorted(shapes(cache.slots, most_tokens, adapted=adapted))
        self._captured: dict[Shape, tuple[PackedInputs, Replay]] = {}
        self._logits = torch.empty(max(shape.wanted for shape in self._shapes), vocab_size, device=device)
        self._hidden: list[Tensor] | None = None  # of the last call; None before the first

    @property
    def token_counts(self) -> list[int]:
        """The numbers of tokens that steps are padded to, ascending."""
        return sorted({shape.tokens for shape in self._shapes})

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of all shapes. Those for which there is too little memory run without a graph."""
        padding = [padding_row(self._cache.slots)]
        self._shapes = record_largest_first(self._shapes, lambda shape: self.outputs(shape, padding, [0]))

    def shape(self, rows: Sequence[RowInput], wanted: int, *, adapted: bool = False) -> Shape | None:
        """Return the smallest shape with room for the rows and so many logits; None if there is none."""
        tokens = sum([len(row.tokens) for row in rows])
        shapes = (shape for shape in self._shapes if shape.adapted == adapted)
        fitting = (s for s in shapes if s.rows >= len(rows) and s.tokens >= tokens and s.wanted >= wanted)
        return min(fitting, key=lambda shape: (shape.tokens, shape.rows), default=None)

    def outputs(self, shape: Shape, rows: Sequence[RowInput], wanted: Sequence[int]) -> tuple[Tensor, ...]:
        """Return logits after the tokens `wanted`, [·, V] float32, and hidden states with padding.

        The rows must fit into `shape`, and their pages must be reserved.
        wanted: indices of tokens, as from `wanted_tokens`.
        """
        inputs = self._pack(shape, rows, wanted)
        if shape not in self._captured:
            buffers = inputs.copy_to(self._device)
            self._allocate_hidden(shape, buffers)
            self._captured[shape] = buffers, self._recorder.record(lambda: self._run(shape, buffers))
        buffers, replay = self._captured[shape]
        copy_into(buffers.integers, inputs.integers)
        return replay()[: len(wanted)], *(self._hidden or ())

    def _run(self, shape: Shape, inputs: PackedInputs) -> Tensor:
        logits, *hidden = self._call(shape, inputs)
        for buffer, states in zip(self._hidden or (), hidden, strict=True):
            buffer[: len(states)].copy_(states)
        return self._logits[: shape.wanted].copy_(logits)

    def _call(self, shape: Shape, inputs: PackedInputs) -> tuple[Tensor, ...]:
        sizes = [shape.wanted, *[shape.rows] * 3, shape.tokens if shape.adapted else 0]
        wanted, slots, indices, pages, adapters = inputs.integers[sum(inputs.sizes) :].split(sizes)
        self._cache.tables_on(self._device).index_put_((slots, indices), pages.int())
        return self._forward(*inputs.unpack(), wanted, adapters if shape.adapted else None)

    def _allocate_hidden(self, shape: Shape, inputs: PackedInputs) -> None:
        """Allocate the memory to which all graphs write hidden states: before a capture, whose memory others use."""
        if self._hidden is None:
            _, *hidden = self._call(shape, inputs)
            sizes = len(self._logits), max(each.tokens for each in self._shapes)
            self._hidden = [
                states.new_empty(size, states.shape[1]) for states, size in zip(hidden, sizes, strict=False)
            ]

    def _pack(self, shape: Shape, rows: Sequence[RowInput], wanted: Sequence[int]) -> PackedInputs:
        """Pack rows, padding, the indices of the tokens whose logits are wanted, new table entries, and adapters."""
        entries = self._cache.pop_updates(shape.rows)
        entries += [(self._cache.slots, 0, 0)] * (shape.rows - len(entries))
        adapters = token_adapters(rows) if shape.adapted else []
        padding = [0] * (shape.tokens - len(adapters)) if shape.adapted else []
        return pack_inputs(
            rows,
            reach=self._reach,
            row_count=shape.rows + 1,  # the last has all tokens of padding
            token_count=shape.tokens,
            spare_slot=self._cache.slots,
            states=() if self._cache.states is None else self._cache.states.plan(rows),
            rest=[
                *wanted,
                *[0] * (shape.wanted - len(wanted)),
                *chain.from_iterable(zip(*entries, strict=True)),
                *adapters,
                *padding,
            ],
        )


def usual_tokens(slots: int, max_query: int) -> int:
    """Return how many tokens the largest usual step has: a draft of every row, and a chunk of a prompt."""
    return _WANTED * slots + max_query


def shapes(slots: int, most_tokens: int, *, adapted: bool = False) -> Iterator[Shape]:
    """Yield the shapes of all graphs: few, because each is captured at the start and takes memory."""
    most_rows = min(slots, MAX_ROWS)
    row_counts = _ROWS[: bisect_left(_ROWS, most_rows) + 1]
    token_counts = _TOKENS[: bisect_left(_TOKENS, min(most_tokens, _TOKENS[-1])) + 1]
    yield from {
        Shape(min(rows, tokens), tokens, min(tokens, _WANTED * rows), kind)
        for rows, tokens, kind in product(row_counts, token_counts, {False, adapted})
    }


def graph_bytes(
    model: PreTrainedModel, slots: int, max_query: int, *, adapted: bool = False, other_graphs: int = 0
) -> dict[torch.device, int]:
    """Return an estimate of the memory that a runner's graphs need, by device; nothing unless the model is on a GPU.

    The largest graph counts, because the others use its memory again. The arguments are those of `Runner` and `shapes`.
    other_graphs: the number of graphs beside the runner's own.
    """
    if model.device.type != "cuda":
        return {}
    config = model.config.get_text_config()
    every = list(shapes(slots, usual_tokens(slots, max_query), adapted=adapted))
    wanted, tokens = max(shape.wanted for shape in every), max(shape.tokens for shape in every)
    hidden = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    copies = 3 if getattr(config, "final_logit_softcapping", None) else 2  # float32: the model's, capped, the graphs'
    logits = wanted * int(config.vocab_size) * copies * torch.float32.itemsize
    activations = tokens * (6 * hidden + 3 * inner) * model.dtype.itemsize
    return {model.device: logits + activations + (len(every) + other_graphs) * _GRAPH_BYTES}
