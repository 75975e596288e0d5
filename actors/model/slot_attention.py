"""Attention over KV slots, registered with transformers as the attention implementation "slots".

Models that take their attention from transformers' `AttentionInterface` run on slots through their own `forward`. They
get the tokens of all rows, one row after another, as a batch of one; only attention sees rows.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from actors.model.native import attention as native
from actors.model.operator_trace import as_one_operator
from actors.model.slot_batch import SlotBatch
from decoding.errors import ConfigError

if TYPE_CHECKING:
    from actors.model.kv_slots import SlotCache

NAME = "slots"


def attend_to_slots(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slot_batch: SlotBatch | None = None,
    slot_cache: "SlotCache | None" = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend to the slots, or by plain SDPA if there is no slot batch, as in `generate`.

    query: [1, heads, N, head_dim]; key, value: [1, kv_heads, N, head_dim]. Returns [1, N, heads, head_dim].

    Raises:
        ConfigError: the layer uses a feature that attention over slots does not have.
    """
    if slot_batch is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options
        )
        return output
    assert slot_cache is not None
    if module not in slot_cache.layers:
        _check(options)
        slot_cache.add_layer(module, key, value)
    return _attend(
        query,
        key,
        value,
        *slot_cache.layers[module],
        slot_batch,
        slot_batch.mask if sliding_window is None else slot_batch.windowed,
        scaling,
    ), None


def _check(options: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ConfigError(f"the model's attention uses {name}, which attention over KV slots does not support")


@as_one_operator
def _attend(
    query: Tensor,  # [1, heads, N, head_dim]
    key: Tensor,  # [1, kv_heads, N, head_dim]
    value: Tensor,
    keys: Tensor,  # [slots + 1, kv_heads, capacity, head_dim]
    values: Tensor,
    batch: SlotBatch,
    mask: Tensor,  # [B, Q, L]
    scale: float | None,
) -> Tensor:
    """Write the new keys and values to their slots, then attend to the first L columns: [1, N, heads, head_dim]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if native.can_attend(query, key, value, keys, values, mask):
        return native.attend(query, key, value, keys, values, batch, mask, scale)
    keys[batch.slots, :, batch.columns] = key[0].transpose(0, 1).to(keys.dtype)
    values[batch.slots, :, batch.columns] = value[0].transpose(0, 1).to(values.dtype)
    (count, width, length), (_, heads, tokens, _), shared = mask.shape, query.shape, key.shape[1]
    grouped = heads // shared * width  # query heads that share a kv head count as more tokens
    padded = query[0].transpose(0, 1)  # [N, heads, head_dim]
    if tokens != count * width:
        padded = padded.new_zeros(count * width, *padded.shape[1:]).index_copy_(0, batch.flat, padded)
    queries = padded.view(count, width, heads, -1).transpose(1, 2).reshape(count, shared, grouped, -1)
    output = scaled_dot_product_attention(
        queries,
        _select(keys, batch.rows, length).to(query.dtype),
        _select(values, batch.rows, length).to(query.dtype),
        attn_mask=mask[:, None, None].expand(-1, 1, heads // shared, -1, -1).reshape(count, 1, grouped, length),
        scale=scale,
    )
    attended = output.view(count, heads, width, -1).transpose(1, 2).flatten(0, 1)  # [B * Q, heads, head_dim]
    return (attended if tokens == count * width else attended[batch.flat])[None].contiguous()


def _select(store: Tensor, rows: Tensor, length: int) -> Tensor:
    """Return the rows' slots, [B, kv_heads, L, head_dim]: a view if the slots are neighbours on a CPU, else a copy."""
    columns = store[:, :, :length]
    if rows.device.type == "cpu":
        slots = rows.tolist()
        if slots == list(range(slots[0], slots[0] + len(slots))):
            return columns[slots[0] : slots[0] + len(slots)]
    return columns.index_select(0, rows)


AttentionInterface.register(NAME, attend_to_slots)
AttentionMaskInterface.register(NAME, sdpa_mask)
