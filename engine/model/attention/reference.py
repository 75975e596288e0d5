"""Attention over pages in plain torch: what other implementations must compute, and where none of them runs.

All sums are float32. It knows nothing of models.
"""

import torch
from torch import Tensor

from engine.model.ragged_batch import MAX_BRANCHES, RaggedBatch

_CHUNK = 128  # tokens whose scores are in memory at a time


def attend(
    query: Tensor,  # [N, heads, D]
    key: Tensor,  # [N, kv_heads, D]
    value: Tensor,  # [N, kv_heads, Dv]
    keys: Tensor,  # [pages, kv_heads, D, page_size]
    values: Tensor,  # [pages, kv_heads, page_size, Dv]
    tables: Tensor,  # [slots + 1, P] int32
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:
    """Write the new keys and values to their pages, then attend: [N, heads, Dv].

    window: a token sees text of the last `window` positions only. softcap: bounds scores (Gemma 2, arXiv 2408.00118).
    sinks: a score per head that takes part in the softmax and has no value (GPT-OSS; Xiao et al., arXiv 2309.17453).
    """
    write(key, value, keys, values, tables, batch)
    slots, lengths, offsets = (part.tolist() for part in (batch.slots, batch.lengths, batch.offsets))
    output = query.new_empty(*query.shape[:2], values.shape[-1])
    for slot, length, first, end in zip(slots, lengths, offsets, offsets[1:], strict=False):
        pages = tables[slot, : -(-length // keys.shape[-1])].long()
        row_keys = keys_of_row(keys, tables, slot, length)
        row_values = values[pages].float().transpose(0, 1).flatten(1, 2)[:, None, :length]  # [kv_heads, 1, L, Dv]
        for start in range(first, end, _CHUNK):
            tokens = slice(start, min(start + _CHUNK, end))
            row_weights = weights(
                query, row_keys, batch, tokens, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
            attended = row_weights @ row_values  # [kv_heads, group, Q, Dv]
            output[tokens] = attended.flatten(0, 1).transpose(0, 1).to(output.dtype)
    return output


def keys_of_row(keys: Tensor, tables: Tensor, slot: int, length: int) -> Tensor:
    """Return the keys in a slot's first L columns, [kv_heads, 1, D, L] float32."""
    pages = tables[slot, : -(-length // keys.shape[-1])].long()
    return keys[pages].float().permute(1, 2, 0, 3).flatten(2)[:, None, :, :length]


def weights(
    query: Tensor,  # [N, heads, D]
    row_keys: Tensor,  # [kv_heads, 1, D, L] float32
    batch: RaggedBatch,
    tokens: slice,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return how much Q tokens of a row attend to its columns, [kv_heads, group, Q, L] float32."""
    grouped = query[tokens].float().unflatten(1, (row_keys.shape[0], -1)).permute(1, 2, 0, 3)  # [kv, group, Q, D]
    scores = grouped @ row_keys * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores.masked_fill_(~visible(batch, tokens, row_keys.shape[-1], window), -torch.inf)
    return _softmax(scores, sinks)


def write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, tables: Tensor, batch: RaggedBatch) -> None:
    """Write new keys and values, [N, kv_heads, D] each, to the pages of their columns."""
    page_size = keys.shape[-1]
    slots = batch.slots[batch.row_of]
    pages, offsets = tables[slots, batch.columns // page_size].long(), batch.columns % page_size
    keys[pages, :, :, offsets] = key.to(keys.dtype)
    values[pages, :, offsets] = value.to(values.dtype)


def visible(batch: RaggedBatch, tokens: slice, length: int, window: int | None) -> Tensor:
    """Return which of the row's first L columns each token sees: [Q, L] bool."""
    trunks, positions = batch.trunks[tokens, None], batch.positions[tokens, None]
    branches = (batch.branches if window is None else batch.window_branches)[tokens, None]
    columns = torch.arange(length, device=trunks.device)
    text = columns < trunks
    if window is not None:
        text &= columns > positions - window
    beyond = columns - trunks
    bits = (branches >> beyond.clamp(0, MAX_BRANCHES - 1)) & 1
    return text | ((beyond >= 0) & (beyond < MAX_BRANCHES) & (bits == 1))


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of columns, [kv_heads, group, Q, L]; with sinks they sum up to less than 1."""
    if sinks is None:
        return scores.softmax(dim=-1)
    kv_heads, group, count, _ = scores.shape
    extra = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, count, -1)
    return torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]
