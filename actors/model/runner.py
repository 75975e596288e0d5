"""Runs any decoder-only Hugging Face causal LM over KV slots, on ragged batches, through the model's own `forward`.

It knows nothing of requests, drafts or sampling: rows of token ids go in at given positions, logits come out.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.model.cuda_graphs import CudaGraphs
from actors.model.forward_input import RowInput
from actors.model.graph_recorder import GraphRecorder, Replay
from actors.model.kv_slots import SlotCache
from actors.model.operator_trace import Example, UntraceableError, trace
from actors.model.slot_attention import NAME
from actors.model.slot_batch import SlotBatch, pack_inputs
from decoding.errors import ConfigError
from decoding.sampling.transfer import tensor_on

_MOST_TRACED = 128  # tokens; with more, the Python beside them does not count
_TRACED_SIZES = (10, 3), (6, 2)  # tokens, and how many of them have logits
_TRIED_AT = 5  # the first column of the calls that a trace is compared in
_log = logging.getLogger(__name__)


class Runner:
    """A model with a cache of `slots` rows, each of `max_length` tokens."""

    whole = False  # whether the model is in this process, on one device: then `forward` may be called by itself
    recorder: GraphRecorder | None = None  # of its calls, on a GPU

    def __init__(self, model: PreTrainedModel, *, slots: int, max_length: int, max_query: int) -> None:
        """max_query: the most tokens that one call brings per row, Q; a tree may reach that far past a row's end.

        Raises:
            ConfigError: the model's attention can't be replaced.
        """
        self.model = model.eval().requires_grad_(False)
        try:
            model.set_attn_implementation(NAME)
        except ValueError as error:
            raise ConfigError(f"{type(model).__name__} can't run over KV slots: {error}") from error
        self.device = model.device
        text_config = model.config.get_text_config()
        self.vocab_size = int(text_config.vocab_size)
        self.max_length = max_length
        self.max_query = max_query
        self.cache = SlotCache(slots=slots, capacity=max_length + max_query)
        self.window: int | None = getattr(text_config, "sliding_window", None)
        self._graphs: CudaGraphs | None = None
        self._traced: Callable[..., Tensor] | None = None
        self.whole = len({parameter.device for parameter in model.parameters()}) == 1
        if self.device.type == "cuda" and self.whole:
            self.use_graphs()

    def shared_copy(self) -> "Runner":
        """Another one over the same model, with as many slots of its own, allocated. One of both may run at a time."""
        twin = Runner(self.model, slots=self.cache.slots, max_length=self.max_length, max_query=self.max_query)
        twin.cache.dtype = self.cache.dtype
        twin.logits([RowInput(slot=0, start=0, tokens=[0])])
        if self._traced is not None:
            twin.use_trace()
        return twin

    def use_graphs(self, capture: Callable[[Replay], Replay] | None = None) -> None:
        """Run small batches as CUDA graphs. capture: another way to record a call, for tests without a GPU."""
        self.recorder = GraphRecorder(capture)
        self._graphs = CudaGraphs(
            self.forward,
            device=self.device,
            dtype=self.model.dtype,
            spare_slot=self.cache.slots,
            capacity=self.cache.capacity,
            window=self.window,
            recorder=self.recorder,
        )

    @torch.inference_mode()
    def use_trace(self) -> None:
        """Run small batches without the model's own Python, where its operators are always the same. On a CPU.

        Slots must be allocated and free: their first columns are written to.
        """
        if self.device.type != "cpu" or not self.whole:
            return
        try:
            traced = trace(self._call, *(self._example([tokens], kept) for tokens, kept in _TRACED_SIZES))
            long = min(_MOST_TRACED // 2, self.max_query, self.max_length - _TRIED_AT)
            for rows in ([1], [2, 1], [long, long]):
                self._compare(traced, rows)
        except UntraceableError as error:
            _log.info("%s runs with its own Python: %s", type(self.model).__name__, error)
        except Exception:
            _log.warning("%s can't be traced, which costs speed", type(self.model).__name__, exc_info=True)
        else:
            self._traced = traced

    def _compare(self, traced: Callable[..., Tensor], rows: Sequence[int]) -> None:
        """Raises UntraceableError if the trace does something else than the model does.

        rows: the number of tokens of each.
        """
        found = []
        for call in (None, traced):
            for keys, values in self.cache.layers.values():  # so that it matters what is written
                for store in (keys, values):
                    store[: len(rows), :, : _TRIED_AT + max(rows)] = 0.5
            sizes, inputs = self._example(rows, sum(rows), start=_TRIED_AT)
            found.append(self._call(*inputs) if call is None else call(*sizes, *inputs))
        if not torch.equal(*found):
            raise UntraceableError(f"it does something else with {rows} tokens")

    def _example(self, rows: Sequence[int], kept: int, start: int = 1) -> Example:
        """A call. rows: the number of tokens of each, from column `start` on."""
        count = sum(rows)
        tokens = iter([(7 * start + 131 * place) % self.vocab_size for place in range(count)])
        given = [RowInput(slot, start, list(islice(tokens, width))) for slot, width in enumerate(rows)]
        written, positions, batch = self._inputs(given, start + max(rows))
        return Example((count, kept), (written, positions, torch.arange(kept), batch, *batch))

    @torch.inference_mode()
    def logits(self, rows: Sequence[RowInput], *, last_only: bool = False) -> Tensor:
        """One forward over ragged rows, whose tokens lie one after the other.

        A row's token attends to the text before it, which earlier calls (or this one) wrote to the row's slot.

        Raises:
            ValueError: a row reaches beyond its slot.

        Returns:
            [N, V] logits after every token, row after row; with `last_only` [B, V], after each row's last token.
        """
        end = max(row.end for row in rows)
        if end > self.cache.capacity:
            raise ValueError(f"a row writes {end} positions, but a slot has {self.cache.capacity}")
        bucket = self._graphs.bucket(rows) if self._graphs else None
        if self._graphs and bucket:
            logits = self._graphs.logits(bucket, rows)
            return logits[self._ends(rows)] if last_only else logits
        return self.forward(*self._inputs(rows, end), self._ends(rows) if last_only else None)

    def forward(self, tokens: Tensor, positions: Tensor, batch: SlotBatch, keep: Tensor | None = None) -> Tensor:
        """tokens, positions: [1, N]. keep: after which of the N tokens logits are wanted; None: all. Returns [·, V]."""
        count = tokens.shape[1]
        if self._traced is None or count > _MOST_TRACED:
            return self._call(tokens, positions, keep, batch)
        kept = torch.arange(count) if keep is None else keep
        return self._traced(count, len(kept), tokens, positions, kept, batch, *batch)

    def _call(self, tokens: Tensor, positions: Tensor, keep: Tensor | None, batch: SlotBatch, *_: Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=batch.mask[:, None],
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            slot_batch=batch,
            slot_cache=self.cache,
        ).logits
        return logits[0]

    def _inputs(self, rows: Sequence[RowInput], columns: int) -> tuple[Tensor, Tensor, SlotBatch]:
        """Return tokens, positions and layout on the device."""
        inputs = pack_inputs(rows, columns, dtype=self.model.dtype, window=self.window)
        return inputs.copy_to(self.device).unpack()

    def _ends(self, rows: Sequence[RowInput]) -> Tensor:
        """[B] int64, the index of each row's last token: where the logits are, or on the CPU if that is anywhere."""
        ends = [*accumulate(len(row.tokens) for row in rows)]
        return tensor_on(self.device if self.whole else "cpu", [end - 1 for end in ends], torch.int64)

    def keep(self, slot: int, trunk: int, path: Sequence[int]) -> None:
        """Make the tree nodes in the columns of `path` the text that follows column trunk - 1."""
        if list(path) != list(range(trunk, trunk + len(path))):
            self.cache.move(slot, path, trunk)

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether there are tokens, all of them in the model's vocabulary, and room for one more in a slot."""
        return 0 < len(tokens) < self.max_length and min(tokens) >= 0 and max(tokens) < self.vocab_size
