"""Runs a decoder-only Hugging Face causal LM over KV slots, on ragged batches, through the model's own `forward`.

It knows nothing of requests, drafts or sampling: rows of token ids go in at given positions, logits come out.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import islice

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from decoding.sampling.transfer import copy_to, tensor_on
from engine.model.attention.interface import NAME
from engine.model.attention.reader import AttentionReader
from engine.model.cuda_graphs import CudaGraphs, usual_tokens
from engine.model.fixed_order.layers import FixedOrderLinear
from engine.model.forward_input import RowInput, token_adapters
from engine.model.graph_recorder import GraphRecorder, Replay
from engine.model.hidden_states import HiddenStateHooks, HiddenStates
from engine.model.kv_pages import KVPages
from engine.model.lora.layers import LoraLayers
from engine.model.native.replay import record_at_once, replay_native_run
from engine.model.native.thread_choice import ThreadChoice
from engine.model.operator_trace import MAX_TRACED_TOKENS, Example, UntraceableError, log_failed_trace, trace
from engine.model.packed_linear import PackedLinear, padded_size
from engine.model.ragged_batch import RaggedBatch, have_gaps, pack_inputs, wanted_tokens, whole_positions

_TRACED_SIZES = (10, 3), (6, 2)  # tokens, and the number of logits
_COMPARED_START = 5  # the first column of the calls in which a trace is compared


class Runner:
    """A model with a cache of `slots` rows, each of `max_length` tokens. Only one thread may use it at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_length: int,
        max_query: int,
        pages: int | None = None,
        lora: LoraLayers | None = None,
    ) -> None:
        """
        max_query: the most tokens of a row in one call, Q; a tree may reach that far past a row's end.
        pages: of the KV cache, for all rows together; None: as many as the slots can ever need.
        lora: the adapters of the model's layers; None: it has none.

        Raises:
            ConfigError: the model's attention implementation can't be replaced.
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
        self.lora = lora
        self.cache = KVPages(slots=slots, capacity=max_length + max_query, pages=pages)
        self.window: int | None = getattr(text_config, "sliding_window", None)
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)  # models make no mask where they get one
        self._traced: dict[bool, Callable[..., tuple[Tensor, ...]]] = {}  # by whether tokens have adapters
        self._threads: ThreadChoice | None = None  # None: a fixed number
        self._graphs: CudaGraphs | None = None
        self._hooks: HiddenStateHooks | None = None
        self.hidden: HiddenStates | None = None  # of the last call of `logits`, if they are kept
        self.recorder: GraphRecorder | None = None  # records calls on a GPU
        sharded = (model.tp_size or 1) > 1  # every process of a group has all its part on one device, too
        # Whether this process has all of the model on one device; `forward` needs that.
        self.single_device = not sharded and len({parameter.device for parameter in model.parameters()}) == 1
        # Whether tokens get the same bits in trees as in chains, if they do in all batches.
        self.trees_are_exact = not any(isinstance(module, FixedOrderLinear) for module in model.modules())
        # Layers of oneDNN and of torch may round a single token's products differently.
        self._pads = self.device.type == "cpu" and any(
            isinstance(module, PackedLinear | nn.Linear) for module in model.modules()
        )
        if self.device.type == "cuda":
            self.use_graphs()

    def shared_copy(self) -> "Runner":
        """Return a runner that shares the weights, with as much of its own cache. Only one may run at a time."""
        size = {"slots": self.cache.slots, "max_length": self.max_length, "max_query": self.max_query}
        copy = Runner(self.model, **size, pages=self.cache.allocator.pages, lora=self.lora)
        copy.cache.dtype = self.cache.dtype
        copy.logits([RowInput(slot=0, start=0, tokens=[0])])
        copy.cache.clear_all()
        if self._traced or self._graphs is not None:
            copy.warm_up()
        return copy

    def keep_hidden_states(self, layers: Sequence[int] = ()) -> None:
        """Let every call of `logits` keep hidden states, in `hidden`. Call it before the first.

        layers: after how many layers, beside the last; see `HiddenStateHooks`.
        """
        self._hooks = HiddenStateHooks(self.model, layers)

    def use_graphs(self, capture: Callable[[Replay], Replay] | None = None) -> None:
        """Run usual batches as CUDA graphs, unless the model is in parts.

        A graph covers one device. One process of a tensor-parallel group can't record alone: its kernels wait for the
        others'. capture: another way to record a call, for tests without a GPU.
        """
        if not self.single_device:
            return
        self.recorder = GraphRecorder(self.device, capture)
        self._graphs = CudaGraphs(
            self._outputs,
            device=self.device,
            cache=self.cache,
            vocab_size=self.vocab_size,
            most_tokens=usual_tokens(self.cache.slots, self.max_query),
            window=self.window,
            adapted=self.lora is not None,
            recorder=self.recorder,
        )

    @property
    def padded_sizes(self) -> Sequence[int]:
        """Numbers of tokens that forwards are padded to, ascending; larger ones are not. Empty without graphs."""
        return self._graphs.token_counts if self._graphs is not None else ()

    def warm_up(self) -> None:
        """Do before the first request what takes long: capture graphs on a GPU, trace the model on a CPU.

        Slots must be allocated and free, because their first columns are overwritten.
        """
        if self._graphs is not None:
            self._graphs.capture()
        self.use_trace()

    def record(self, tokens: int) -> None:
        """Prepare for steps of one row with so many tokens: on a CPU their native functions are recorded.

        Slot 0 is overwritten.
        """
        if self._traced:
            with record_at_once():
                for start in (0, 1):  # the second call is compared with what the first recorded
                    self.logits([RowInput(0, start, [start] * tokens)])

    @torch.inference_mode()
    def use_trace(self) -> None:
        """Run small batches on a CPU without the model's Python code, if its sequence of operators is fixed.

        Pages must be allocated and free, because some are overwritten.
        """
        if self.device.type != "cpu" or not self.single_device:
            return
        for adapted in (False,) if self.lora is None else (False, True):
            self._use_trace(adapted=adapted)
        if self._traced and torch.get_num_threads() > 1 and self._is_same_on_one_thread():
            self._threads = ThreadChoice(torch.get_num_threads())

    def _is_same_on_one_thread(self) -> bool:
        """Whether logits have the same bits with one thread as with all. Slots 0 and 1 are overwritten."""
        threads, results = torch.get_num_threads(), []
        for number in (threads, 1):
            torch.set_num_threads(number)
            calls = ([RowInput(slot, 0, [slot] * length) for slot in (0, 1)] for length in (1, 4, self._longest_half()))
            results.append(torch.cat([self.logits(rows).clone() for rows in calls]))
            self.cache.clear_all()
        torch.set_num_threads(threads)
        return torch.equal(*results)

    def _use_trace(self, *, adapted: bool) -> None:
        sizes = [([tokens], logits) for tokens, logits in _TRACED_SIZES]
        with log_failed_trace(type(self.model).__name__):
            first, second = (self._example(*size, adapted=adapted) for size in sizes)
            traced = trace(self._call, first, second, change=replay_native_run)
            long = self._longest_half()
            for counts in ([1], [2, 1], [long, long]):
                self._compare(traced, counts, adapted=adapted)
            self._traced[adapted] = traced
        self.cache.clear_all()

    def _longest_half(self) -> int:
        """Return the most tokens of each of two rows in a traced call that starts at `_COMPARED_START`."""
        room = (self.cache.allocator.available // 2 - 1) * self.cache.page_size
        return min(MAX_TRACED_TOKENS // 2, self.max_query, self.max_length - _COMPARED_START, room)

    def _compare(self, traced: Callable[..., tuple[Tensor, ...]], counts: Sequence[int], *, adapted: bool) -> None:
        """Raise UntraceableError if the trace and the model differ. counts: the number of tokens of each row."""
        results = []
        sizes, inputs = self._example(counts, sum(counts), adapted=adapted, start=_COMPARED_START)  # reserves the pages
        for call in (None, traced):
            pages = self.cache.tables[: len(counts)].unique()
            for store in (store for stores in self.cache.layers.values() for store in stores):
                store[pages] = 0.5  # the results then depend on what is written
            results.append(self._call(*inputs) if call is None else call(*sizes, *inputs))
        if not all(map(torch.equal, *results)):
            raise UntraceableError(f"it does something else with {counts} tokens")

    def _example(self, counts: Sequence[int], logits: int, *, adapted: bool, start: int = 1) -> Example:
        """Return a call. counts: the tokens of each row, from column `start` on. logits: after how many tokens."""
        tokens = iter([(7 * start + 131 * index) % self.vocab_size for index in range(sum(counts))])
        rows = [
            RowInput(slot, start, list(islice(tokens, count)), adapter=int(adapted))
            for slot, count in enumerate(counts)
        ]
        self.cache.prepare_writes((row.slot, row.start, row.end) for row in rows)
        inputs, positions, batch = self._inputs(rows)
        adapters = self._adapters(rows, inputs.numel())
        given = (inputs, positions, torch.arange(logits), batch)
        return Example((inputs.numel(), logits), given if adapters is None else (*given, adapters))

    @torch.inference_mode()
    def logits(self, rows: Sequence[RowInput]) -> Tensor:
        """Run one forward over ragged rows.

        A token attends to the text before it, which this call or earlier ones wrote to the row's slot.

        Raises:
            ValueError: a row is longer than its slot.
            OutOfPagesError: there are too few pages for the new tokens. Nothing was written then.

        Returns:
            [n, V] float32 logits after the tokens that want them, row after row. The next call may overwrite them, as
            it may `hidden`: on a GPU both are what a graph writes to.
        """
        extents = [(row.slot, row.start, row.end) for row in rows]
        end = max([end for _, _, end in extents])
        if end > self.cache.capacity:
            raise ValueError(f"a row writes {end} positions, but a slot has {self.cache.capacity}")
        wanted = wanted_tokens(rows)
        shape = None
        if self._graphs and not have_gaps(rows):
            adapted = self.lora is not None and bool(token_adapters(rows))
            shape = self._graphs.shape(rows, len(wanted), adapted=adapted)
        if self._graphs and shape:
            self.cache.reserve_all(extents)
            logits, *hidden = self._graphs.outputs(shape, rows, wanted)
        else:
            self.cache.prepare_writes(extents)
            inputs, positions, batch = self._inputs(rows)
            kept, adapters = self._to_keep(wanted, inputs.numel()), self._adapters(rows, inputs.numel())
            with nullcontext() if self._threads is None else self._threads.timing(inputs.numel()):
                logits, *hidden = self._outputs(inputs, positions, batch, kept, adapters)
        if hidden:
            last, layers = hidden
            self.hidden = HiddenStates(last[: len(wanted)], layers[: sum([len(row.tokens) for row in rows])])
        return logits[: len(wanted)]

    def forward(
        self, tokens: Tensor, positions: Tensor, batch: RaggedBatch, logits_to_keep: Tensor | None = None
    ) -> Tensor:
        """Return [·, V] logits. tokens, positions: [1, N]. logits_to_keep: indices of tokens; None: all."""
        return self._outputs(tokens, positions, batch, logits_to_keep)[0]

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[RowInput], layers: Sequence[int]) -> HiddenStates:
        """Return the hidden states of a forward with logits after all tokens, whichever `logits` keeps. It is slow."""
        self.cache.prepare_writes((row.slot, row.start, row.end) for row in rows)
        tokens, positions, batch = self._inputs(rows)
        with HiddenStateHooks(self.model, layers).reading() as kept:
            self._call(tokens, positions, None, batch, self._adapters(rows, tokens.numel()))
        count = sum([len(row.tokens) for row in rows])
        return HiddenStates(*(states[:count] for states in kept))

    @torch.inference_mode()
    def attention(self, row: RowInput) -> Tensor:
        """Return how much each new token attends to each column, [Q, columns] float32. It is slow.

        The largest weight over all layers and heads. The model must be on a single device.
        """
        self.cache.prepare_writes([(row.slot, row.start, row.end)])
        tokens, positions, batch = self._inputs([row])
        reader = AttentionReader(len(row.tokens))
        kept, adapters = self._to_keep([0], tokens.numel()), self._adapters([row], tokens.numel())
        self._model_logits(tokens, positions, kept, batch, adapters, attention_reader=reader)
        return reader.largest

    def _outputs(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        logits_to_keep: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return logits, [·, V], and the hidden states to keep, if any. adapters: [N], as `_adapters` returns."""
        count, traced = tokens.shape[1], self._traced.get(adapters is not None)
        if traced is None or count > MAX_TRACED_TOKENS:
            return self._call(tokens, positions, logits_to_keep, batch, adapters)
        kept = torch.arange(count) if logits_to_keep is None else logits_to_keep
        return traced(count, len(kept), tokens, positions, kept, batch, *([] if adapters is None else [adapters]))

    def _call(
        self,
        tokens: Tensor,
        positions: Tensor,
        logits_to_keep: Tensor | None,
        batch: RaggedBatch,
        adapters: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if self._hooks is None:
            return (self._model_logits(tokens, positions, logits_to_keep, batch, adapters),)
        with self._hooks.reading() as kept:
            logits = self._model_logits(tokens, positions, logits_to_keep, batch, adapters)
        return (logits, *kept)

    def _model_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        logits_to_keep: Tensor | None,
        batch: RaggedBatch,
        adapters: Tensor | None,
        **options: object,
    ) -> Tensor:
        with nullcontext() if adapters is None or self.lora is None else self.lora.applied(adapters):
            logits: Tensor = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=self._no_mask,
                use_cache=False,
                logits_to_keep=0 if logits_to_keep is None else logits_to_keep,
                ragged_batch=batch,
                kv_pages=self.cache,
                **options,
            ).logits
        return logits[0].float()

    def _adapters(self, rows: Sequence[RowInput], count: int) -> Tensor | None:
        """Return the slot of each token's adapter, [count] int64 with padding; None if no token has one."""
        adapters = [] if self.lora is None else token_adapters(rows)
        if not adapters:
            return None
        return tensor_on(self.device, [*adapters, *[0] * (count - len(adapters))], torch.int64)

    def _inputs(self, rows: Sequence[RowInput]) -> tuple[Tensor, Tensor, RaggedBatch]:
        """Return tokens, positions and layout on the device, padded for layers that pad: once, not in each of them."""
        count = sum(len(row.tokens) for row in rows)
        padded = padded_size(count) if self._pads else count
        packed = pack_inputs(
            rows,
            window=self.window,
            row_count=len(rows) + (padded > count),
            token_count=padded,
            spare_slot=self.cache.slots,
        )
        tokens, positions, batch = packed.copy_to(self.device).unpack()
        if have_gaps(rows):
            positions = copy_to(self.device, whole_positions(rows, packed.unpack()[1]))
        return tokens, positions, batch

    def _to_keep(self, wanted: Sequence[int], count: int) -> Tensor | None:
        """Return the indices of the tokens whose logits the model computes, int64, at least one; None: all `count`.

        On the device of the logits, or on the CPU.
        """
        if len(wanted) == count:
            return None
        return tensor_on(self.device if self.single_device else "cpu", wanted or [0], torch.int64)

    def compact(self, slot: int, trunk: int, path: Sequence[int]) -> None:
        """Move the tree nodes in the columns of `path` to the columns from `trunk` on, as text."""
        if list(path) != list(range(trunk, trunk + len(path))):
            self.cache.move(slot, path, trunk)

    def can_run(self, tokens: Sequence[int]) -> bool:
        """Whether the text is not empty, has only tokens of the vocabulary, and leaves room in a slot."""
        return 0 < len(tokens) < self.max_length and self.has_tokens(tokens)

    def has_tokens(self, tokens: Sequence[int]) -> bool:
        """Whether all tokens are in the vocabulary."""
        return not tokens or (min(tokens) >= 0 and max(tokens) < self.vocab_size)
