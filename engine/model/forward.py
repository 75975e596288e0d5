"""A model's own forward over KV pages. On a CPU small batches run without its Python, where that can be traced."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.sampling.transfer import tensor_on
from engine.kernels.attention import RaggedBatch
from engine.kernels.native_replay import replay_native_run
from engine.kernels.operator_trace import MAX_TRACED_TOKENS, Example, UntraceableError, log_failed_trace, trace
from engine.layers.lora import LoraLayers
from engine.layers.onednn_linear import PackedLinear, padded_size
from engine.model.attention import AttentionReader, Rows, TokensBefore, model_reach, running_over
from engine.model.hidden_states import HiddenStateHooks
from engine.model.kv_pages import KVPages
from engine.model.ragged_batch import RowInput, pack_inputs, token_adapters
from engine.model.state_layers import token_multiple

_TRACED_TOKENS = 5  # at least; this number and twice as many are traced
COMPARED_START = 5  # the first column of the calls in which a trace is compared

# Of sizes and inputs, as `ModelForward` calls it.
_Traced = Callable[..., tuple[Tensor, ...]]


class ForwardInputs(NamedTuple):
    """N tokens, padding included, on the model's device."""

    tokens: Tensor  # [1, N] int64
    positions: Tensor  # [1, N] int64, as the model sees them
    batch: RaggedBatch
    adapters: Tensor | None  # [N] int64, the slot of each token's adapter; None: no token has one


class ModelForward:
    """From packed rows to logits and hidden states. Only one thread may use it at a time."""

    def __init__(self, model: PreTrainedModel, cache: KVPages, lora: LoraLayers | None) -> None:
        self.hooks: HiddenStateHooks | None = None  # of the hidden states to return; None: none
        self.reach = model_reach(model.config.get_text_config())
        self._model, self._cache, self._lora, self._device = model, cache, lora, model.device
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self._device)  # models make no mask where they get one
        self._traced: dict[bool, _Traced] = {}  # by whether tokens have adapters
        self._asks_cache = any(getattr(module, "attn_temperature_tuning", False) for module in model.modules())
        self._multiple = token_multiple(model) if self._device.type == "cpu" else 1
        # Layers of oneDNN and of torch may round a single token's products differently.
        self._pads = self._device.type == "cpu" and any(
            isinstance(module, PackedLinear | nn.Linear) for module in model.modules()
        )

    @property
    def is_traced(self) -> bool:
        """Whether small batches run without the model's Python."""
        return bool(self._traced)

    def pack(self, rows: Sequence[RowInput]) -> ForwardInputs:
        """Return the rows as inputs, padded for layers that pad: once, not in each of them."""
        count = sum(len(row.tokens) for row in rows)
        padded = padded_size(count) if self._pads else count
        padded = -(-padded // self._multiple) * self._multiple
        packed = pack_inputs(
            rows,
            reach=self.reach,
            row_count=len(rows) + (padded > count),
            token_count=padded,
            spare_slot=self._cache.slots,
            states=() if self._cache.states is None else self._cache.states.plan(rows),
        )
        adapters = [] if self._lora is None else token_adapters(rows)
        slots = [*adapters, *[0] * (padded - len(adapters))]
        return ForwardInputs(
            *packed.copy_to(self._device).unpack(), tensor_on(self._device, slots, torch.int64) if adapters else None
        )

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        wanted: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return logits, [·, V] float32, and the hidden states to keep, if any. Inputs: see `ForwardInputs`.

        wanted: indices of the tokens after which logits are wanted, int64; None: after all.
        """
        count, traced = tokens.shape[1], self._traced.get(adapters is not None)
        if traced is None or count > MAX_TRACED_TOKENS:
            return self._run(tokens, positions, batch, wanted, adapters)
        kept = torch.arange(count) if wanted is None else wanted
        given = () if adapters is None else (adapters,)
        return traced(count, len(kept), tokens, positions, batch, kept, *given)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        wanted: Tensor | None,
        adapters: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        inputs = ForwardInputs(tokens, positions, batch, adapters)
        if self.hooks is None:
            return (self.logits(inputs, wanted),)
        with self.hooks.reading() as kept:
            logits = self.logits(inputs, wanted)
        return (logits, *kept)

    def logits(
        self, inputs: ForwardInputs, wanted: Tensor | None = None, reader: AttentionReader | None = None
    ) -> Tensor:
        """Return [·, V] float32 by the model's Python. wanted: as above. reader: takes in each layer's attention."""
        adapters = inputs.adapters
        adapted = nullcontext() if adapters is None or self._lora is None else self._lora.applied(adapters)
        asked = {"past_key_values": TokensBefore(inputs.batch)} if self._asks_cache else {}
        with adapted, running_over(Rows(inputs.batch, self._cache, reader)):
            logits: Tensor = self._model(
                input_ids=inputs.tokens,
                position_ids=inputs.positions,
                attention_mask=self._no_mask,
                use_cache=False,
                logits_to_keep=0 if wanted is None else wanted,
                **asked,
            ).logits
        return logits[0].float()

    def trace(self, longest: int, slots: Sequence[int]) -> Iterator[None]:
        """Trace the model in parts, if its sequence of operators is fixed.

        longest: the most tokens of each of the two rows by which the trace is compared with the model.
        slots: two that are free; each part overwrites and clears them.
        """
        for adapted in (False,) if self._lora is None else (False, True):
            with log_failed_trace(type(self._model).__name__):
                tokens = -(-_TRACED_TOKENS // self._multiple) * self._multiple
                sizes = (2 * tokens, 3), (tokens, 2)  # and the number of logits
                examples = (self._example({slots[0]: count}, logits, adapted=adapted) for count, logits in sizes)
                traced = trace(self._run, *examples, change=replay_native_run)
                for counts in ([1], [2, 1], [longest, longest]):
                    self._clear(slots)
                    yield
                    self._compare(traced, dict(zip(slots, counts, strict=False)), adapted=adapted)
                self._traced[adapted] = traced
            self._clear(slots)
            yield

    def _clear(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._cache.clear(slot)

    def _compare(self, traced: _Traced, counts: Mapping[int, int], *, adapted: bool) -> None:
        """Raise UntraceableError if the trace and the model differ. counts: as in `_example`."""
        results, slots = [], list(counts)
        # This reserves the pages.
        sizes, inputs = self._example(counts, sum(counts.values()), adapted=adapted, start=COMPARED_START)
        for call in (None, traced):
            pages = self._cache.tables[slots].unique()
            for store in (store for stores in self._cache.layers.values() for store in stores):
                store[pages] = 0.5  # the results then depend on what is written
            for part in (part for parts in self._cache.state_memory.values() for part in parts):
                part[slots] = 0.5
            results.append(self._run(*inputs) if call is None else call(*sizes, *inputs))
        if not all(map(torch.equal, *results)):
            raise UntraceableError(f"it does something else with {list(counts.values())} tokens")

    def _example(self, counts: Mapping[int, int], logits: int, *, adapted: bool, start: int = 1) -> Example:
        """Return a call. counts: the tokens of each slot, from column `start` on. logits: after how many tokens."""
        self._clear(counts)
        vocab_size = int(self._model.config.get_text_config().vocab_size)
        text = iter([(7 * start + 131 * index) % vocab_size for index in range(sum(counts.values()))])
        rows = [
            RowInput(slot, start, list(islice(text, count)), adapter=int(adapted)) for slot, count in counts.items()
        ]
        self._cache.prepare_writes((row.slot, row.start, row.end) for row in rows)
        tokens, positions, batch, adapters = self.pack(rows)
        given = (tokens, positions, batch, torch.arange(logits), *([] if adapters is None else [adapters]))
        return Example((tokens.numel(), logits), given)
