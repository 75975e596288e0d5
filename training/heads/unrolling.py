"""An EAGLE-3 head run on its own output for several steps, from every position of many texts at once.

It computes what drafting from each position would (training-time test: Li et al., arXiv 2503.01840, section 3.2). Must
not know about losses. B rows, T tokens, h heads.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from engine.heads.eagle3 import Eagle3Head


def unroll(head: Eagle3Head, features: Tensor, embeddings: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the layer's outputs of step 0, 1, …, [B, T, H]: entry p of step s is what predicts token p + 2 + s.

    In step s the draft that started after position p takes its own output in place of the features of position p + s.
    It attends to the true columns up to p and to its own after these. Entries whose token p + 1 + s is beyond T mean
    nothing.

    Args:
        features: [B, T, k · H] the target's hidden states after each token.
        embeddings: [B, T, H] of these tokens.
    """
    layer: Any = head.layers[0]
    attention = layer.self_attn
    length = features.shape[1]
    groups = attention.num_key_value_groups
    positions = torch.arange(length, device=features.device)[None]
    future = torch.ones(length, length, dtype=torch.bool, device=features.device).triu(1)
    hidden: Tensor = head.fc(features)
    keys, values = [], []
    for step in range(steps):
        following = embeddings.roll(-1 - step, dims=1)
        normed = layer.hidden_norm(hidden)
        both = torch.cat([layer.input_layernorm(following), normed], dim=-1)
        q, k, v = (
            projection(both).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cosines, sines = head.rotary_emb(hidden, position_ids=positions + step)
        q, k = apply_rotary_pos_emb(q, k, cosines, sines)
        keys.append(repeat_kv(k, groups))
        values.append(repeat_kv(v, groups))
        if step == 0:
            attended = scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            scores = (q @ keys[0].mT).masked_fill(future, -torch.inf)  # [B, h, T, T]
            own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]  # [B, h, T, 1] each
            scores = torch.cat([scores, *own], dim=-1).float() * attention.scaling
            weights = scores.softmax(-1).to(q.dtype)
            attended = weights[..., :length] @ values[0]
            for index, value in enumerate(values[1:]):
                attended = attended + weights[..., length + index, None] * value
        residual = normed if layer.norm_before_residual else hidden
        residual = residual + attention.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = residual + layer.mlp(layer.post_attention_layernorm(residual))
        yield hidden
