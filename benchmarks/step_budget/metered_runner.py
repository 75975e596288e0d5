"""A runner of a Llama or a hybrid on the `meta` device, where weights take no memory; its graphs are counted."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3_5TextConfig
from transformers.models.llama import modeling_llama

from benchmarks.step_budget.traffic import ACTIVATIONS, Meter, Traffic, storage
from decoding.sampling import sampler
from engine.kernels import native_state
from engine.kernels.attention import RaggedBatch
from engine.kernels.state import Convolution, Recurrence
from engine.layers import mlp, quantized_linear
from engine.layers.faster_layers import use_faster_layers
from engine.layers.quantized_linear import FixedOrderQuantizedLinear
from engine.loading import quantizer
from engine.model import attention as interface
from engine.model.cuda import Replay
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

# hidden, layers, heads, kv heads, intermediate, tied output layer
_SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "8b": (4096, 32, 32, 8, 14336, False),  # Llama 3
    "1b": (2048, 16, 32, 8, 8192, True),  # Llama 3.2
    "135m": (576, 30, 9, 3, 1536, True),  # SmolLM2
    "tiny": (64, 2, 4, 2, 128, False),
}
WEIGHTS, KEYS_AND_VALUES, STATES, LOGITS = "weights", "keys and values", "states", "logits"
CATEGORIES = (WEIGHTS, KEYS_AND_VALUES, STATES, LOGITS, ACTIVATIONS)
SHAPES = tuple(_SIZES)
HYBRID = "hybrid"  # Qwen3.5 of 9 B parameters; Qwen3-Next has the same layers that carry a state


def llama_config(shape: str, vocab_size: int, layers: int | None = None) -> LlamaConfig:
    """Return the configuration of a shape. layers: their number, if it is not the shape's."""
    hidden, usual_layers, heads, kv_heads, intermediate, tied = _SIZES[shape]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers or usual_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )


def hybrid_config(vocab_size: int, layers: int | None = None) -> Qwen3_5TextConfig:
    """Return the configuration of a model of which three of four layers carry a state. layers: their number."""
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=4096,
        num_hidden_layers=layers or 32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=12288,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
    )


def meta_model(shape: str, vocab_size: int, layers: int | None = None, *, bits: int | None = None) -> PreTrainedModel:
    """Return a model in bfloat16 on the `meta` device, with the modules that a server gives it on a GPU.

    layers: their number, if it is not the shape's. bits: to which it is quantised, if it is.
    """
    config: PretrainedConfig = (
        llama_config(shape, vocab_size, layers) if shape != HYBRID else hybrid_config(vocab_size, layers)
    )
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    if bits is not None:
        with patch.object(quantizer, "rounded", lambda weight, kind: quantizer.empty_weight(weight.shape, kind)):
            quantizer.round_layers(model, "int4" if bits == 4 else "int8")
    with ExitStack() as stack:
        stack.enter_context(patch.object(quantized_linear, "computes_integers", lambda device: True))
        for name in ("_may_be_faster", "_agree"):  # gated layers are compared on random numbers, which are not here
            stack.enter_context(patch.object(mlp, name, lambda *given: True))
        use_faster_layers(model)
    return model


class FakeCapture:
    """Stands for CUDA graphs: a capture runs the call once and notes what it costs, a replay costs that again."""

    def __init__(self, make_meter: Callable[[], AbstractContextManager[Meter]]) -> None:
        self.captured = 0
        self.capturing = False
        self.traffic: Traffic | None = None  # where replays are counted
        self.on_replay: Callable[[], None] = lambda: None
        self._make_meter = make_meter

    def __call__(self, run: Replay) -> Replay:
        """Capture a call, as `GraphRecorder` asks."""
        self.captured += 1
        self.capturing = True
        with self._make_meter() as meter:
            output = run()
        self.capturing = False

        def replay() -> Tensor:
            if self.traffic is not None:
                self.traffic.add(meter.traffic)
            self.on_replay()
            return output

        return replay


class MeteredRunner:
    """A runner on the `meta` device, and what it costs."""

    def __init__(
        self,
        shape: str,
        *,
        vocab_size: int,
        columns: int,
        slots: int,
        max_length: int,
        max_query: int,
        layers: int | None = None,
        bits: int | None = None,
    ) -> None:
        """
        shape: in `SHAPES`, or `HYBRID`.
        columns: how many the rows of a step have together, which attention reads.
        layers, bits: as in `meta_model`.
        """
        self.vocab_size, self.columns = vocab_size, columns
        before = _live_tensors()
        model = meta_model(shape, vocab_size, layers, bits=bits)
        self._weights = {key: size for key, size in _live_tensors().items() if key not in before}
        self.runner = Runner(model, slots=slots, max_length=max_length, max_query=max_query)
        self.runner.logits([RowInput(slot=0, start=0, tokens=[0])])  # allocates the pages
        cache = self.runner.cache
        self._stores = {storage(store) for stores in cache.layers.values() for store in stores}
        self._states = {storage(part) for parts in cache.state_memory.values() for part in parts}
        self.capture = FakeCapture(self.metered)
        self.runner.use_graphs(self.capture)
        self.runner.warm_up()

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
            stack.enter_context(meter.one_kernel(interface, "_attend", self._attention_bytes))
            stack.enter_context(meter.one_kernel(native_state, "_convolve", _convolution_bytes))
            stack.enter_context(meter.one_kernel(native_state, "_recur", _recurrence_bytes))
            stack.enter_context(meter.one_kernel(sys.modules[__name__], "shape_of_choice", _choice_bytes))
            stack.enter_context(meter.one_kernel(FixedOrderQuantizedLinear, "forward", _product_bytes))
            stack.enter_context(meter.one_kernel(mlp, "_silu_gate_on_gpu", _activation_bytes))
            stack.enter_context(meter.one_kernel(modeling_llama, "apply_rotary_pos_emb", _activation_bytes))
            stack.enter_context(meter)
            yield meter

    @contextmanager
    def metered_replays(self) -> Iterator[Meter]:
        """Count what runs on the device, and what replays stand for."""
        with self.metered() as meter:
            self.capture.traffic = meter.traffic
            yield meter
            self.capture.traffic = None

    def _category(self, tensor: Tensor) -> str:
        if storage(tensor) in self._weights:
            return WEIGHTS
        if storage(tensor) in self._stores:
            return KEYS_AND_VALUES
        if storage(tensor) in self._states:
            return STATES
        return LOGITS if tensor.dim() > 1 and tensor.shape[-1] == self.vocab_size else ACTIVATIONS

    def _attention_bytes(
        self,
        result: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        batch: RaggedBatch,
        *options: object,
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return what a kernel reads and writes that reads each row's keys and values once, and writes the new ones."""
        column = keys.shape[1] * (keys.shape[2] * keys.itemsize + values.shape[3] * values.itemsize)
        integers = sum(part.nbytes for part in batch) + 4 * self.columns // keys.shape[-1]
        return (
            {KEYS_AND_VALUES: column * self.columns, ACTIVATIONS: query.nbytes + key.nbytes + value.nbytes + integers},
            {KEYS_AND_VALUES: column * len(key), ACTIVATIONS: result.nbytes},
        )

    def weight_bytes(self) -> int:
        """Return the bytes of the weights that a step must read: all but an embedding of its own."""
        model = self.runner.model
        read = _storages(model.get_output_embeddings())
        unread = _storages(model.get_input_embeddings()) - read
        return sum(size for key, size in self._weights.items() if key not in unread)

    def column_bytes(self) -> int:
        """Return the bytes of one token's keys and values."""
        stores = [store for stores in self.runner.cache.layers.values() for store in stores]
        return sum(store[0].nbytes for store in stores) // self.runner.cache.page_size

    def state_bytes(self) -> int:
        """Return the bytes of one row's states, without the inputs that are kept of its last columns."""
        states = (parts[0] for parts in self.runner.cache.state_memory.values() if len(parts) == 2)
        return sum(state[0].nbytes for state in states)


def _storages(layer: nn.Module) -> set[int]:
    tensors = (*layer.parameters(), *layer.buffers(), *vars(layer).values())
    return {storage(tensor) for tensor in tensors if isinstance(tensor, Tensor)}


def _shape_of_product(layer: FixedOrderQuantizedLinear, x: Tensor) -> Tensor:
    weight = layer.quantized
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=layer.out_dtype or x.dtype)


def _shape_of_gate(both: Tensor) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


def _activation_bytes(result: Tensor | tuple[Tensor, ...], *given: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    results = (result,) if isinstance(result, Tensor) else result
    read, written = (sum(tensor.nbytes for tensor in tensors) for tensors in (given, results))
    return {ACTIVATIONS: read}, {ACTIVATIONS: written}


def _product_bytes(
    result: Tensor, layer: FixedOrderQuantizedLinear, x: Tensor
) -> tuple[dict[str, int], dict[str, int]]:
    weights = sum(part.nbytes for part in layer.quantized.parts().values())
    category = LOGITS if layer.out_dtype == torch.float32 else ACTIVATIONS
    return {WEIGHTS: weights, ACTIVATIONS: x.nbytes}, {category: result.nbytes}


def _shape_of_attention(query: Tensor, key: Tensor, value: Tensor, *others: object) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


def _shape_of_convolution(x: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x)


def _shape_of_recurrence(query: Tensor, key: Tensor, value: Tensor, *others: object) -> Tensor:
    return torch.empty_like(value)


def _convolution_bytes(result: Tensor, *given: object) -> tuple[dict[str, int], dict[str, int]]:
    args = Convolution._make(given)
    column, rows = args.ring[0, 0].nbytes, len(args.batch.slots)
    known = rows * (args.weight.shape[1] - 1) * column
    read = {STATES: known, WEIGHTS: args.weight.nbytes, ACTIVATIONS: args.x.nbytes}
    return read, {STATES: len(args.x) * column, ACTIVATIONS: result.nbytes}


def _recurrence_bytes(result: Tensor, *given: object) -> tuple[dict[str, int], dict[str, int]]:
    """Each row's state is read and written once, and as many kept inputs are read as written, at the most."""
    args = Recurrence._make(given)
    moved = len(args.batch.slots) * args.states[0].nbytes + len(args.key) * args.ring[0, 0].nbytes
    inputs = [part for part in args[:6] if part is not None]
    return {STATES: moved, ACTIVATIONS: sum(part.nbytes for part in inputs)}, {
        STATES: moved,
        ACTIVATIONS: result.nbytes,
    }


def shape_of_choice(
    logits: Tensor, settings: Tensor, count: int, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what a fused choice of tokens returns."""
    return logits.new_empty(len(logits), count, dtype=torch.int64), logits.new_empty(len(logits), count)


def _choice_bytes(
    result: tuple[Tensor, Tensor], logits: Tensor, settings: Tensor, count: int, token_ids: Tensor | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    return {LOGITS: logits.nbytes, ACTIVATIONS: settings.nbytes}, {ACTIVATIONS: result[0].nbytes + result[1].nbytes}


@contextmanager
def skipped_kernels() -> Iterator[None]:
    """Let attention, which reads rows' lengths, and the fused choice of tokens compute nothing, if a GPU has them."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(interface, "_attend", _shape_of_attention))
        stack.enter_context(patch.object(FixedOrderQuantizedLinear, "forward", _shape_of_product))
        stack.enter_context(patch.object(mlp, "_silu_gate_on_gpu", _shape_of_gate))
        stack.enter_context(patch.object(native_state, "_convolve", _shape_of_convolution))
        stack.enter_context(patch.object(native_state, "_recur", _shape_of_recurrence))
        if find_spec("decoding.kernels.triton_choice"):
            stack.enter_context(patch.object(sampler, "fused_choice", lambda device: shape_of_choice))
        yield


def _live_tensors() -> dict[int, int]:
    """Return the bytes of all memory on the `meta` device, by what identifies it. Layers may hide their weights."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, Parameter) and thing.is_meta]
    return {storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
