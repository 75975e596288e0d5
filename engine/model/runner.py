"""Runs a decoder-only Hugging Face causal LM over KV slots, on ragged batches.

Rows of token ids go in at given positions, logits come out.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from decoding.sampling.transfer import tensor_on
from engine.kernels.attention import RaggedBatch
from engine.kernels.native_replay import record_at_once
from engine.kernels.operator_trace import MAX_TRACED_TOKENS
from engine.layers.linear import FixedOrderLinear
from engine.layers.lora import LoraLayers
from engine.model.attention import AttentionReader, use_pages
from engine.model.cuda import GraphRecorder, Replay
from engine.model.cuda_graphs import CudaGraphs, usual_tokens
from engine.model.forward import COMPARED_START, ModelForward
from engine.model.hidden_states import EarlyExit, HiddenStateHooks, HiddenStates
from engine.model.kv_pages import KVPages
from engine.model.ragged_batch import RowInput, token_adapters, wanted_tokens
from engine.model.row_states import MAX_UNSETTLED
from engine.model.state_layers import use_state_layers
from engine.model.thread_choice import ThreadChoice, few_threads

PRACTICE_PAGES = 32  # of the KV cache, that a part of `practice` needs at most
_FREE_SLOTS = 4  # that a runner must have to hold two of them for practice


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

        Raises ConfigError if the model's attention implementation can't be replaced.
        """
        self.model = model.eval().requires_grad_(False)
        try:
            use_pages(model)
        except ValueError as error:
            raise ConfigError(f"{type(model).__name__} can't run over KV slots: {error}") from error
        self.device = model.device
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.max_length, self.max_query = max_length, max_query
        self.lora = lora
        self._carries_states = use_state_layers(self.model)
        self.use_cache(KVPages(slots=slots, capacity=max_length + max_query, pages=pages))
        self._threads: ThreadChoice | None = None  # None: a fixed number
        self.practises_later = False  # whether `practice` is still to be done
        self._graphs: CudaGraphs | None = None
        self.hidden: HiddenStates | None = None  # of the last call of `logits`, if they are kept
        self.kept_layers: tuple[int, ...] = ()  # after which hidden states are kept, beside the last
        self.early_exit: EarlyExit | None = None  # makes logits of these, for formulas
        self.recorder: GraphRecorder | None = None  # records calls on a GPU
        sharded = (model.tp_size or 1) > 1  # every process of a group has all its part on one device, too
        # Whether this process has all of the model on one device; `forward` needs that.
        self.single_device = not sharded and len({parameter.device for parameter in model.parameters()}) == 1
        # Whether tokens get the same bits in trees as in chains, if they do in all batches.
        fixed_order = any(isinstance(module, FixedOrderLinear) for module in model.modules())
        self.trees_are_exact = not fixed_order and not self.has_states
        if self.device.type == "cuda":
            self.use_graphs()

    def use_cache(self, cache: KVPages) -> None:
        """Keep keys and values there. Call it before the first call."""
        self.cache = cache
        if self._carries_states and cache.states is None:
            cache.carry_states(cache.slots)
        self._forward = ModelForward(self.model, cache, self.lora)
        self.reach = self._forward.reach  # of the layers that have one; None: none has

    def shared_copy(self) -> "Runner":
        """Return a runner that shares the weights but no adapters, with as much of its own cache.

        Only one may run at a time.
        """
        copy = Runner(
            self.model,
            slots=self.cache.slots,
            max_length=self.max_length,
            max_query=self.max_query,
            pages=self.cache.allocator.pages,
        )
        copy.cache.dtype = self.cache.dtype
        copy.logits([RowInput(slot=0, start=0, tokens=[0])])
        copy.cache.clear_all()
        if self._forward.is_traced or self._graphs is not None:
            copy.warm_up()
        return copy

    def keep_hidden_states(self, layers: Sequence[int] = ()) -> None:
        """Let every call of `logits` keep hidden states, in `hidden`. Call it before the first.

        layers: after how many layers, beside the last; see `HiddenStateHooks`.
        """
        self._forward.hooks = HiddenStateHooks(self.model, layers)
        self.kept_layers = tuple(layers)

    def use_early_exits(self, layers: Sequence[int]) -> None:
        """Let formulas read what these layers would predict. Call it before the first call of `logits`.

        Raises ConfigError as `HiddenStateHooks` and `EarlyExit` do.
        """
        self.keep_hidden_states(layers)
        self.early_exit = EarlyExit(self.model, layers)

    def use_graphs(self, capture: Callable[[Replay], Replay] | None = None) -> None:
        """Run usual batches as CUDA graphs, unless the model is in parts.

        A graph covers one device. One process of a tensor-parallel group can't record alone: its kernels wait for the
        others'. capture: another way to record a call, for tests without a GPU.
        """
        if not self.single_device:
            return
        self.recorder = GraphRecorder(self.device, capture)
        self._graphs = CudaGraphs(
            self._forward,
            device=self.device,
            cache=self.cache,
            vocab_size=self.vocab_size,
            most_tokens=usual_tokens(self.cache.slots, self.max_query),
            reach=self.reach,
            adapted=self.lora is not None,
            recorder=self.recorder,
        )

    @property
    def has_states(self) -> bool:
        """Whether the model carries a state from token to token, beside keys and values."""
        return self.cache.states is not None

    @property
    def max_draft(self) -> int:
        """The most tokens of a draft that the model can take back."""
        return MAX_UNSETTLED if self.has_states else self.max_length

    @property
    def padded_sizes(self) -> Sequence[int]:
        """Numbers of tokens that forwards are padded to, ascending; larger ones are not. Empty without graphs."""
        return self._graphs.token_counts if self._graphs is not None else ()

    def warm_up(self, *, later: bool = False) -> None:
        """Do what takes long before the first request: capture graphs on a GPU, trace the model on a CPU.

        Slots must be allocated and free, because their first columns are overwritten. later: leave to `practice` what
        the first request can do without.
        """
        if self._graphs is not None:
            self._graphs.capture()
        can_wait = self.cache.slots >= _FREE_SLOTS and self.cache.allocator.pages >= 2 * PRACTICE_PAGES
        self.practises_later = later and self.device.type == "cpu" and self.single_device and can_wait
        if not self.practises_later:
            self.use_trace()

    def use_trace(self) -> None:
        """Do all of `practice` at once."""
        for _ in self.practice((0, 1)):
            pass

    @torch.inference_mode()
    def practice(self, slots: Sequence[int]) -> Iterator[None]:
        """Prepare in parts for small batches without the model's Python code, if its operators' sequence is fixed.

        slots: two that are free; each part overwrites and clears them. It needs up to `PRACTICE_PAGES`.
        """
        if self.device.type != "cpu" or not self.single_device:
            return
        room = (self.cache.allocator.available // 2 - 1) * self.cache.page_size
        longest = min(MAX_TRACED_TOKENS // 2, self.max_query, self.max_length - COMPARED_START, room)
        parts = self._forward.trace(longest, slots)
        is_over = False
        while not is_over:
            with few_threads(self.model):
                is_over = next(parts, parts) is parts
            yield
        threads = torch.get_num_threads()
        if self._forward.is_traced and threads > 1 and (yield from self._is_same_on_one_thread(longest, slots)):
            self._threads = ThreadChoice(threads)

    def _is_same_on_one_thread(self, longest: int, slots: Sequence[int]) -> Generator[None, None, bool]:
        """Return whether logits have the same bits with one thread as with all. In parts, as `practice`."""
        threads = torch.get_num_threads()
        for length in (1, 4, longest):
            results = []
            for number in (threads, 1):
                torch.set_num_threads(number)
                results.append(self.logits([RowInput(slot, 0, [slot] * length) for slot in slots]).clone())
                torch.set_num_threads(threads)
                for slot in slots:
                    self.cache.clear(slot)
                yield
            if not torch.equal(*results):
                return False
        return True

    def record(self, tokens: int, slot: int = 0) -> None:
        """Prepare for steps of one row with so many tokens: on a CPU their native functions are recorded.

        slot: a free one, which is overwritten.
        """
        if self._forward.is_traced and not self.has_states:
            with record_at_once():
                for start in (0, 1):  # the second call is compared with what the first recorded
                    self.logits([RowInput(slot, start, [start] * tokens)])

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
        if self._graphs:
            adapted = self.lora is not None and bool(token_adapters(rows))
            shape = self._graphs.shape(rows, len(wanted), adapted=adapted)
        if self._graphs and shape:
            self.cache.reserve_all(extents)
            with self.cache.losing_states(row.slot for row in rows):
                logits, *hidden = self._graphs.outputs(shape, rows, wanted)
        else:
            self.cache.prepare_writes(extents)
            with self.cache.losing_states(row.slot for row in rows):
                tokens, positions, batch, adapters = self._forward.pack(rows)
                count = tokens.numel()
                with nullcontext() if self._threads is None else self._threads.timing(count):
                    logits, *hidden = self._forward(tokens, positions, batch, self._to_keep(wanted, count), adapters)
        if hidden:
            last, layers = hidden
            self.hidden = HiddenStates(last[: len(wanted)], layers[: sum([len(row.tokens) for row in rows])])
        return logits[: len(wanted)]

    def forward(self, tokens: Tensor, positions: Tensor, batch: RaggedBatch, adapters: Tensor | None = None) -> Tensor:
        """Return [N, V] logits after all tokens, in pages that are there. Inputs: see `ForwardInputs`."""
        return self._forward(tokens, positions, batch, adapters=adapters)[0]

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[RowInput], layers: Sequence[int]) -> HiddenStates:
        """Return the hidden states of a forward with logits after all tokens, whichever `logits` keeps. It is slow."""
        self.cache.prepare_writes((row.slot, row.start, row.end) for row in rows)
        hooks = HiddenStateHooks(self.model, layers)
        with self.cache.losing_states(row.slot for row in rows), hooks.reading() as kept:
            self._forward.logits(self._forward.pack(rows))
        count = sum([len(row.tokens) for row in rows])
        return HiddenStates(*(states[:count] for states in kept))

    @torch.inference_mode()
    def attention(self, row: RowInput) -> Tensor:
        """Return how much each new token attends to each column, [Q, columns] float32. It is slow.

        The largest weight over all layers and heads. The model must be on a single device.
        """
        self.cache.prepare_writes([(row.slot, row.start, row.end)])
        reader, inputs = AttentionReader(len(row.tokens)), self._forward.pack([row])
        self._forward.logits(inputs, self._to_keep([0], inputs.tokens.numel()), reader)
        return reader.largest

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
