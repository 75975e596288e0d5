"""A runner on the `meta` device, whose graphs are counted. It knows nothing of requests."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from actors.model import slot_attention
from actors.model.forward_input import RowInput
from actors.model.runner import Runner
from benchmarks.step_budget.recorder import FakeCapture
from benchmarks.step_budget.shapes import meta_model
from benchmarks.step_budget.traffic import ACTIVATIONS, Meter, storage

WEIGHTS, KEYS_AND_VALUES, LOGITS = "weights", "keys and values", "logits"
CATEGORIES = (WEIGHTS, KEYS_AND_VALUES, LOGITS, ACTIVATIONS)


class MeteredRunner:
    """A runner on the `meta` device, and what it costs."""

    def __init__(
        self, shape: str, *, vocab_size: int, slots: int, max_length: int, max_query: int, layers: int | None = None
    ) -> None:
        """shape: in `SHAPES`. layers: as in `meta_model`."""
        self.vocab_size = vocab_size
        before = _live_tensors()
        model = meta_model(shape, vocab_size, layers)
        self._weights = {key: size for key, size in _live_tensors().items() if key not in before}
        self.runner = Runner(model, slots=slots, max_length=max_length, max_query=max_query)
        self.runner.logits([RowInput(slot=0, start=0, tokens=[0])])  # allocates the slots
        self._stores = {storage(store) for stores in self.runner.cache.layers.values() for store in stores}
        self.capture = FakeCapture(self.metered)
        self.runner.use_graphs(self.capture)

    @contextmanager
    def without_forwards(self) -> Iterator[None]:
        """Let the model compute nothing, except while a graph is captured. For prompts, which take long on `meta`."""
        model, forward = self.runner.model, self.runner.model.forward

        def skip(*args: Any, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **options: Any) -> Any:
            if self.capture.capturing:
                return forward(*args, input_ids=input_ids, logits_to_keep=logits_to_keep, **options)
            count = input_ids.shape[1] if isinstance(logits_to_keep, int) else len(logits_to_keep)
            return SimpleNamespace(logits=torch.empty(1, count, self.vocab_size, dtype=model.dtype, device="meta"))

        model.forward = skip
        try:
            yield
        finally:
            del model.forward

    @contextmanager
    def metered(self) -> Iterator[Meter]:
        """Count what runs on the device."""
        meter = Meter(self._category)
        with ExitStack() as stack:
            stack.enter_context(meter.one_kernel(slot_attention, "scaled_dot_product_attention", self._attention_bytes))
            stack.enter_context(meter)
            yield meter

    def _category(self, tensor: Tensor) -> str:
        if storage(tensor) in self._weights:
            return WEIGHTS
        if storage(tensor) in self._stores:
            return KEYS_AND_VALUES
        return LOGITS if tensor.dim() > 1 and tensor.shape[-1] == self.vocab_size else ACTIVATIONS

    @staticmethod
    def _attention_bytes(
        result: Tensor, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, scale: float
    ) -> tuple[dict[str, int], dict[str, int]]:
        read = {KEYS_AND_VALUES: key.nbytes + value.nbytes, ACTIVATIONS: query.nbytes + attn_mask.nbytes}
        return read, {ACTIVATIONS: result.nbytes}

    def weight_bytes(self) -> int:
        """Return the bytes of the weights that a step must read: all but an embedding of its own."""
        embedding, output = (
            storage(layer.weight)
            for layer in (self.runner.model.get_input_embeddings(), self.runner.model.get_output_embeddings())
        )
        return sum(size for key, size in self._weights.items() if key != embedding or key == output)

    def column_bytes(self) -> int:
        """Return the bytes of one token's keys and values."""
        stores = [store for stores in self.runner.cache.layers.values() for store in stores]
        return sum(store.shape[1] * store.shape[3] * store.element_size() for store in stores)


def _live_tensors() -> dict[int, int]:
    """Return the bytes of all memory on the `meta` device, by what identifies it. Layers may hide their weights."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, Parameter) and thing.is_meta]
    return {storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
