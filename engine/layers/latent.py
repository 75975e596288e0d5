"""Attention to latents: keys and values of all heads are products of one short vector per token, which alone is kept.

DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1. A score is the product of a query and a key. So a query can
be projected to the space of latents once, instead of each latent to a key; and the weighted sum of latents to a value.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engine.layers.linear import make_head_linears

PROJECTION = "kv_b_proj"  # what transformers calls the layer from latents to keys and values, …
EXPANSION = "expand_kv"  # … and the method of attention that calls it


class LatentHeads(nn.Module):
    """The projection of latents of R numbers to keys of K, without their rotated part, and values of V for H heads."""

    def __init__(self, weight: Tensor, key_size: int, value_size: int, *, deterministic: bool = True) -> None:
        """weight: [H · (K + V), R]. deterministic: as in `use_faster_layers`."""
        super().__init__()
        self._heads, self._key_size = len(weight) // (key_size + value_size), key_size
        keys, values = weight.detach().unflatten(0, (self._heads, -1)).split([key_size, value_size], dim=1)
        self._to_latents = make_head_linears(keys.transpose(1, 2).contiguous(), deterministic=deterministic)
        self._to_values = make_head_linears(values.contiguous(), deterministic=deterministic)

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries for latents and rotated keys, [N, H, R + …]. query: [N, H, K + …]."""
        plain, rotated = query[..., : self._key_size], query[..., self._key_size :]
        return torch.cat([self._to_latents(plain), rotated], dim=-1)

    def values(self, latents: Tensor) -> Tensor:
        """Return [..., H, V]. latents: [..., H, R]."""
        values: Tensor = self._to_values(latents)
        return values

    def forward(self, latents: Tensor) -> Tensor:
        """Return keys and values, [..., H · (K + V)], as plain forwards need them. It is slow. latents: [..., R]."""
        eye = torch.eye(self._key_size, dtype=latents.dtype, device=latents.device)
        weight = self._to_latents(eye[:, None].expand(-1, self._heads, -1))  # [K, H, R]
        keys = torch.einsum("...r,khr->...hk", latents, weight)
        values = self.values(latents[..., None, :].expand(*latents.shape[:-1], self._heads, -1))
        return torch.cat([keys, values], dim=-1).flatten(-2)


def latent_layers(model: nn.Module) -> Iterator[Any]:
    """Yield the attention modules of a model that have latents."""
    return (module for module in model.modules() if hasattr(module, PROJECTION) and hasattr(module, EXPANSION))


def replace_latent_projections(model: nn.Module, *, deterministic: bool = True) -> None:
    """Replace the projections of latents by `LatentHeads`. Call it before other layers are replaced."""
    for module in latent_layers(model):
        if not isinstance(module.kv_b_proj, LatentHeads):
            sizes = module.qk_nope_head_dim, module.v_head_dim
            module.kv_b_proj = LatentHeads(module.kv_b_proj.weight, *sizes, deterministic=deterministic)
