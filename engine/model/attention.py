"""Attention over paged keys and values, registered with transformers as the attention implementation "paged".

Models that take their attention from transformers' `AttentionInterface` run on pages through their own `forward`. They
get the tokens of all rows, one row after another, as a batch of one; only attention sees rows.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from decoding.errors import ConfigError
from engine.kernels import attention as reference
from engine.kernels import native_attention as native
from engine.kernels.attention import AttentionArgs, RaggedBatch, Reach
from engine.kernels.native import native_operator
from engine.kernels.operator_trace import as_one_operator
from engine.layers.latent import EXPANSION, PROJECTION, LatentHeads, latent_layers, replace_latent_projections

if TYPE_CHECKING:
    from engine.model.kv_pages import KVPages

NAME = "paged"
_CHUNKED = "chunked_attention"  # in `layer_types`


class AttentionReader:
    """The largest weight over all layers and heads, of one row's Q tokens to each of its L columns."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.largest = torch.zeros(())  # [Q, L] float32 after the forward

    def read(self, args: AttentionArgs) -> None:
        """Take in one layer, once its keys are written."""
        largest = reference.row_weights(args, self._tokens).flatten(0, 1).amax(dim=0)  # [Q, L]
        self.largest = largest if self.largest.dim() == 0 else torch.maximum(self.largest, largest)


class Rows:
    """The rows that a model runs over in one forward."""

    def __init__(self, batch: RaggedBatch, cache: "KVPages", reader: AttentionReader | None = None) -> None:
        self.batch, self.cache, self.reader = batch, cache, reader
        self._calls: Counter[nn.Module] = Counter()

    def count_call(self, module: nn.Module) -> tuple[nn.Module, int]:
        """Return a key for this call: the module, and how often it attended before. DiffLlama's attend twice."""
        self._calls[module] += 1
        return module, self._calls[module] - 1


_current: ContextVar[Rows | None] = ContextVar("rows", default=None)
current_rows = _current.get


class TokensBefore:
    """Takes the place of a cache in layers that ask it how many tokens precede those of a call (Llama 4).

    They add it to the index of each token in the call, so it is a number for each: [N] int64.
    """

    def __init__(self, batch: RaggedBatch) -> None:
        self._batch = batch

    def get_seq_length(self, layer: int = 0) -> Tensor:
        return _tokens_before(self._batch)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return key, value


@contextmanager
def running_over(rows: Rows) -> Iterator[None]:
    """Let the layers of a model run over these rows in the block. Few models hand other arguments to their layers."""
    token = _current.set(rows)
    try:
        yield
    finally:
        _current.reset(token)


@as_one_operator
def _tokens_before(batch: RaggedBatch) -> Tensor:
    return batch.positions - torch.arange(len(batch.positions), device=batch.positions.device)


def attend_to_pages(  # noqa: PLR0913  (transformers' interface of attention)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the pages of the current rows; without rows, as in `generate`, by the model's own plain attention.

    query: [1, heads, N, head_dim]; key, value: [1, kv_heads, N, head_dim], or what `use_pages` makes of them.
    Returns [1, N, heads, head_dim].

    Raises ConfigError if the layer uses a feature that attention over pages does not have.
    """
    rows = current_rows()
    if rows is None:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
        options |= {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        output: tuple[Tensor, Tensor | None] = eager(module, query, key, value, attention_mask, **options)
        return output
    kv_pages, projection = rows.cache, getattr(module, PROJECTION, None)
    latents = projection if isinstance(projection, LatentHeads) else None
    call = rows.count_call(module)
    if call not in kv_pages.layers:
        if options.get("position_bias") is not None:
            raise ConfigError("the model's attention uses position_bias, which attention over pages does not support")
        kv_pages.add_layer(call, key, value if latents is None else None)
    keys, *values = kv_pages.layers[call]
    states = query[0].transpose(0, 1)
    args = AttentionArgs(
        query=states if latents is None else latents.absorb(states),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        keys=keys,
        values=values[0] if values else None,
        tables=kv_pages.tables_on(query.device),
        batch=rows.batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        reach=_chunks(module) if sliding_window is None else Reach(sliding_window),
        softcap=softcap,
        sinks=s_aux,
    )
    attended = _attend(*args)
    if rows.reader is not None:
        rows.reader.read(args)
    return (attended if latents is None else latents.values(attended))[None], None


def use_pages(model: PreTrainedModel) -> None:
    """Let a model attend to pages. They hold its latents, if it has any and its layers are on one device.

    Raises ValueError if its attention can't be replaced.
    """
    model.set_attn_implementation(NAME)
    if (model.tp_size or 1) > 1:
        return
    replace_latent_projections(model)
    for module in latent_layers(model):
        if EXPANSION not in vars(module):
            vars(module)[EXPANSION] = _passing_latents(module.expand_kv)


def _passing_latents(expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def keys_and_values(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """latents: [1, 1, N, R]; rotated: the rotated part of keys, [1, 1, N, ·]. Returns what pages hold of both."""
        if current_rows() is None:
            return expand(latents, rotated)
        return torch.cat([latents, rotated], dim=-1), latents

    return keys_and_values


def model_reach(config: PretrainedConfig) -> Reach | None:
    """Return how far back tokens see in the layers that limit it; None: no layer does."""
    if _CHUNKED in (getattr(config, "layer_types", None) or ()):
        return Reach(config.attention_chunk_size, in_chunks=True)
    window: int | None = getattr(config, "sliding_window", None)
    return None if window is None else Reach(window)


def _chunks(module: nn.Module) -> Reach | None:
    """Return the chunks of a layer whose tokens see their own chunk only; its class leaves that to masks."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "attention_chunk_size", None) is None or config.layer_types[module.layer_idx] != _CHUNKED:
        return None
    return model_reach(config)


@native_operator
def _attend(*given: Any) -> Tensor:
    """Attend, [N, heads, Dv]. Traces know tensors only, so the fields of `AttentionArgs` are given one by one."""
    args = AttentionArgs._make(given)
    return _implementation(args)(args)


def _implementation(args: AttentionArgs) -> Callable[[AttentionArgs], Tensor]:
    """Return the fastest for these tensors. Triton is imported where there is a GPU only."""
    if args.query.is_cuda:
        from engine.kernels import triton_attention

        return triton_attention.attend
    return native.attend if native.can_attend(args) else reference.attend


AttentionInterface.register(NAME, attend_to_pages)
AttentionMaskInterface.register(NAME, eager_mask)
