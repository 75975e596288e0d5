"""Layers that carry a state, made to run over ragged rows.

In transformers, these layers call functions of their Python modules for convolutions and recurrences. Here a layer's
own forward runs with other functions in their place, so its projections, gates and norms stay as they are. Outside
`running_over`, as in `generate`, the replacements call the originals.
"""

import inspect
from collections.abc import Callable, Iterator
from math import gcd
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.kernels import native_state
from engine.kernels.state import RING, Convolution, Recurrence
from engine.model.attention import Rows, current_rows
from engine.model.kv_pages import KVPages

_ELEMENTS = 64  # elements that torch's CPU loops take at once, which fill a few vector registers
_ACTIVATIONS = (None, "silu", "swish")
_Function = Callable[..., Any]


class Inputs(NamedTuple):
    """The inputs of a recurrence for N tokens, as in `Recurrence`."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    rates: Tensor | None = None
    beta: Tensor | None = None


class StateLayer:
    """One layer's state, and the functions that update it for the rows of the current batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._recurrences = 0  # since the last convolution: Zamba's layers have one per head

    def convolution(self, original: _Function) -> _Function:
        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, **more: Any) -> Any:
            """x: [1, D, N]; weight: [D, W]. Returns [1, D, N]."""
            rows = current_rows()
            if rows is None:
                return original(x, weight, bias, **more)
            batch, cache = rows.batch, rows.cache
            self._recurrences = 0
            (ring,) = self._memory(cache, "convolution", x.device, ((RING, x.shape[1]), x.dtype))
            tokens = x[0].T.contiguous()
            activation = more.get("activation")
            if activation not in _ACTIVATIONS:
                raise ConfigError(f"its convolutions are followed by {activation}; only silu can run over KV slots")
            own = weight.to(x.dtype).contiguous(), None if bias is None else bias.to(x.dtype)
            return native_state.convolve(Convolution(tokens, *own, ring, batch, activation is not None)).T[None]

        return convolve

    def delta_rule(self, original: _Function) -> _Function:
        def recur(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
            """query, key: [1, N, G, K]; value: [1, N, H, V]; beta: [1, N, H]; g: the same, or [1, N, H, K].

            Returns [1, N, H, V].
            """
            rows = current_rows()
            if rows is None:
                return original(query, key, value, **more)
            decay = more["g"][0] if more["g"].dim() == key.dim() else more["g"][0, ..., None]
            inputs = Inputs(query[0], key[0], value[0], decay, beta=more["beta"][0])
            normalises, scale = more["use_qk_l2norm_in_kernel"], query.shape[-1] ** -0.5
            output = self._recur(rows, inputs, normalises=normalises, scale=scale)
            return output[None].to(query.dtype), None

        return recur

    def scan(self, original: _Function) -> _Function:
        def recur(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **more: Any) -> Any:
            """x: [1, N, H, P]; dt: [1, N, H]; a: [H]; b, c: [1, N, G, S]. Returns [1, N, H, P]. Mamba 2."""
            rows = current_rows()
            if rows is None:
                return original(x, dt, a, b, c, **more)
            steps = dt if more.get("dt_bias") is None else dt + more["dt_bias"].to(dt.dtype)
            steps = softplus(steps) if more.get("dt_softplus") else steps
            steps = steps.clamp(*more.get("dt_limit", (0.0, float("inf"))))[0].float()
            values = x[0].float()
            inputs = Inputs(c[0], b[0], values * steps[..., None], (steps * a)[..., None])
            output = self._recur(rows, inputs, normalises=False, scale=1.0)
            if more.get("D") is not None:
                output = output + values * more["D"].float()[:, None]
            return output[None]

        return recur

    def selective_scan(self, original: _Function) -> _Function:
        def recur(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **more: Any) -> Any:
            """x, dt: [1, D, N]; a: [D, S]; b, c: [1, S, N]. Returns [1, D, N]. Mamba 1."""
            rows = current_rows()
            if rows is None:
                return original(x, dt, a, b, c, **more)
            values, steps = x[0].T.float(), dt[0].T.float()
            if more.get("delta_bias") is not None:
                steps = steps + more["delta_bias"]
            steps = softplus(steps) if more.get("delta_softplus") else steps
            query, key, value, decay = (
                part[:, None] for part in (c[0].T, b[0].T, values * steps, steps)
            )  # of one head
            inputs = Inputs(query, key, value, decay, rates=a.T[None].float().contiguous())
            output = self._recur(rows, inputs, normalises=False, scale=1.0)[:, 0]
            if more.get("D") is not None:
                output = output + values * more["D"]
            if more.get("z") is not None:
                output = output * silu(more["z"][0].T.float())
            return output.T[None]

        return recur

    def _recur(self, rows: Rows, inputs: Inputs, *, normalises: bool, scale: float) -> Tensor:
        """Return the outputs, [N, H, V] float32."""
        key, value = inputs.key, inputs.value
        heads, width = value.shape[1:]
        size = sum(part[0].numel() for part in (key, value, inputs.decay)) + heads
        shapes = ((heads, key.shape[-1], width), torch.float32), ((RING, size), torch.float32)
        self._recurrences += 1
        states, ring = self._memory(rows.cache, f"recurrence {self._recurrences}", key.device, *shapes)
        query, key, value, decay = (part.float().contiguous() for part in inputs[:4])
        beta = None if inputs.beta is None else inputs.beta.float().contiguous()
        args = Recurrence(query, key, value, decay, inputs.rates, beta, states, ring, rows.batch, normalises, scale)
        return native_state.recur(args)

    def _memory(
        self, cache: KVPages, kind: str, device: torch.device, *parts: tuple[tuple[int, ...], torch.dtype]
    ) -> tuple[Tensor, ...]:
        key = self._module, kind
        return cache.state_memory.get(key) or cache.add_state(key, device, *parts)


# Methods that make a replacement from the original, by the name of that function in transformers.
_REPLACEMENTS: dict[str, Callable[[StateLayer, _Function], _Function]] = {
    "causal_conv1d_fn": StateLayer.convolution,
    "torch_chunk_gated_delta_rule": StateLayer.delta_rule,
    "chunk_kimi_delta_attention": StateLayer.delta_rule,
    "mamba2_chunk_scan": StateLayer.scan,
    "mamba_selective_scan": StateLayer.selective_scan,
}


def carries_known_states(model: PreTrainedModel) -> bool:
    """Whether the model has layers that carry a state of a kind that runs over ragged rows."""
    return any(True for _ in _layers(model))


def _layers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, FunctionType, set[str]]]:
    """Yield each layer that carries a state, its class's forward, and the names of the functions to replace in it."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if isinstance(forward, FunctionType):
            names = _REPLACEMENTS.keys() & set(forward.__code__.co_names)
            if names:
                yield module, forward, names


def token_multiple(model: PreTrainedModel) -> int:
    """Return the multiple to pad token counts to, so that a token's bits don't depend on the count on a CPU.

    torch computes the last elements of a tensor, which don't fill a vector register, by other formulas.
    """
    vectors = (
        weight for module, _, _ in _layers(model) for weight in module.parameters() if weight.squeeze().dim() < 2
    )
    return max((_ELEMENTS // gcd(_ELEMENTS, weight.numel()) for weight in vectors), default=1)


def use_state_layers(model: PreTrainedModel) -> bool:
    """Make the model's layers that carry a state run over ragged rows. Returns whether there are any."""
    any_layer = False
    for module, forward, names in _layers(model):
        any_layer = True
        if "forward" in vars(module):  # replaced already
            continue
        layer = StateLayer(module)
        scope = forward.__globals__ | {name: _REPLACEMENTS[name](layer, forward.__globals__[name]) for name in names}
        scope["apply_mask_to_padding_states"] = _without_padding(scope.get("apply_mask_to_padding_states"))
        bound = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
        bound.__kwdefaults__ = forward.__kwdefaults__
        vars(module)["forward"] = MethodType(bound, module)
    return any_layer


def _without_padding(original: _Function | None) -> _Function:
    """Return a function that masks padding as a model does, but nothing over ragged rows, which have none."""
    return lambda states, mask: states if original is None or current_rows() else original(states, mask)
