"""Attention over paged keys and values, registered with transformers as the attention implementation "paged".

Models that take their attention from transformers' `AttentionInterface` run on pages through their own `forward`. They
get the tokens of all rows, one row after another, as a batch of one; only attention sees rows.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from decoding.errors import ConfigError
from engine.model.attention import reference
from engine.model.attention.reader import AttentionReader
from engine.model.native import attention as native
from engine.model.native.calls import native_operator
from engine.model.ragged_batch import RaggedBatch

if TYPE_CHECKING:
    from engine.model.kv_pages import KVPages

NAME = "paged"


def attend_to_pages(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ragged_batch: RaggedBatch | None = None,
    kv_pages: "KVPages | None" = None,
    attention_reader: AttentionReader | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the pages, or by the model's own plain attention if there is no ragged batch, as in `generate`.

    query: [1, heads, N, head_dim]; key, value: [1, kv_heads, N, head_dim]. Returns [1, N, heads, head_dim].

    Raises:
        ConfigError: the layer uses a feature that attention over pages does not have.
    """
    if ragged_batch is None:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
        options |= {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        output: tuple[Tensor, Tensor | None] = eager(module, query, key, value, attention_mask, **options)
        return output
    assert kv_pages is not None
    if module not in kv_pages.layers:
        if options.get("position_bias") is not None:
            raise ConfigError("the model's attention uses position_bias, which attention over pages does not support")
        kv_pages.add_layer(module, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tables = kv_pages.tables_on(query.device)
    queries, new_keys, new_values = (each[0].transpose(0, 1) for each in (query, key, value))
    keys, values = kv_pages.layers[module]
    attended = _attend(
        queries, new_keys, new_values, keys, values, tables, ragged_batch, scale, sliding_window, softcap, s_aux
    )
    if attention_reader is not None:
        attention_reader.read(
            queries, keys, tables, ragged_batch, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
        )
    return attended[None], None


@native_operator
def _attend(
    query: Tensor,  # [N, heads, D]
    key: Tensor,  # [N, kv_heads, D]
    value: Tensor,  # [N, kv_heads, Dv]
    keys: Tensor,  # [pages, kv_heads, D, page_size]
    values: Tensor,  # [pages, kv_heads, page_size, Dv]
    tables: Tensor,  # [slots + 1, P]
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Write the new keys and values to their pages, then attend: [N, heads, Dv]."""
    return _implementation(query, keys)(
        *(query, key, value, keys, values, tables, batch), scale=scale, window=window, softcap=softcap, sinks=sinks
    )


def _implementation(query: Tensor, keys: Tensor) -> Callable[..., Tensor]:
    """Return the fastest for these tensors. Triton is imported where there is a GPU only."""
    if query.is_cuda:
        from engine.model.attention import triton_kernel

        return triton_kernel.attend
    return native.attend if native.can_attend(query, keys) else reference.attend


AttentionInterface.register(NAME, attend_to_pages)
AttentionMaskInterface.register(NAME, eager_mask)
