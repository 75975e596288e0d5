"""Linear layers with low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): each token has its own, or none.

The adapters of a layer are stacked: S slots of R rows each. Two products compute all of them, [N, in] to [N, S · R] to
[N, out], and in between a mask leaves each token its own slot. A foreign slot adds zeros, so bits depend on nothing but
the token. Shapes and addresses are fixed, as CUDA graphs and traces need.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decoding.errors import ConfigError
from engine.layers.latent import PROJECTION
from engine.layers.linear import make_linear

LoraPair = tuple[Tensor, Tensor]  # of one linear layer: down [r, in], and up [out, r], scaled: W + up · down

_ALIGNMENT = 16  # rows of a slot: sums over them then have one order in every slot, also in a GPU's 16 × 16 products …
_ALIGNMENT_OF_TILES = 32  # … and in products of bfloat16 on a CPU, which may add 32 inputs at once
_EXPERTS = "experts"  # layers below see some tokens only, …
_OUTPUTS = "lm_head", "output"  # … as do output layers, those of heads, too


class LoraLinear(nn.Module):
    """A linear layer, or several joined ones that see the same input, with the adapters of `slots` slots."""

    def __init__(self, base: nn.Module, layers: Sequence[nn.Module], owner: "LoraLayers") -> None:
        """base: computes the layers, [..., in] to [..., out of all]."""
        super().__init__()
        self.base = base
        self.sizes = [_size(layer) for layer in layers]  # in, out
        self._owner = owner
        self._width = len(layers) * owner.rank  # R
        shape = owner.slots * self._width, self.sizes[0][0]
        self._downs = torch.zeros(shape, dtype=owner.dtype, device=owner.device)
        self._ups = self._downs.new_zeros(sum(out for _, out in self.sizes), len(self._downs))
        self.down, self.up = owner.make(self._downs), owner.make(self._ups)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., N, in]; returns [..., N, out]."""
        result: Tensor = self.base(x)
        foreign = self._owner.foreign
        if foreign is None:
            return result
        hidden = self.down(x).unflatten(-1, (self._owner.slots, self._width)).masked_fill(foreign, 0.0)
        own: Tensor = self.up(hidden.flatten(-2))
        return result + own.to(result.dtype)

    @property
    def weight(self) -> Any:
        """The weight of the base layer, or what stands for it; some models read its dtype."""
        return self.base.weight

    @property
    def nbytes(self) -> int:
        """Bytes of all its adapters; on a CPU there is a packed copy."""
        return (self._downs.nbytes + self._ups.nbytes) * (2 if self._ups.device.type == "cpu" else 1)

    def write(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """Replace what is in a slot. pairs: one for each of the joined layers."""
        rank, first, end = self._owner.rank, (slot - 1) * self._width, slot * self._width
        self._downs[first:end] = 0
        self._ups[:, first:end] = 0
        row = 0
        for index, (pair, (_, out)) in enumerate(zip(pairs, self.sizes, strict=True)):
            if pair is not None:
                down, up = pair
                start = first + index * rank
                self._downs[start : start + len(down)] = down
                self._ups[row : row + out, start : start + len(down)] = up
            row += out
        for layer, weight in ((self.down, self._downs), (self.up, self._ups)):
            _copy_weight(layer, self._owner.make(weight))


class LoraLayers:
    """The adapters of one model: `slots` at once, of ranks up to `rank`. Slot 0 is no adapter."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        rank: int,
        deterministic: bool = True,
        part: nn.Module | None = None,
        drafts: bool = False,
    ) -> None:
        """Prepare a model, before its layers are replaced.

        deterministic: as in `use_faster_layers`.
        part: beside the model, such as a head; its layers get adapters then, and not the model's.
        drafts: one more slot, the last, is for weights by which the model drafts for itself, and no request's.
        """
        self.slots, self.max_rank, self._deterministic = slots + drafts, rank, deterministic
        self.dtype, self.device = model.dtype, model.device
        in_tiles = self.device.type == "cpu" and self.dtype == torch.bfloat16
        alignment = _ALIGNMENT_OF_TILES if in_tiles and rank > _ALIGNMENT else _ALIGNMENT
        self.rank = -(-rank // alignment) * alignment
        self.foreign: Tensor | None = None  # [N, S, 1] bool: slots that aren't the token's; None: no token has any
        self.versions = [""] * slots  # what was written to each slot that requests may have
        top: nn.Module = model if part is None else part
        inner = set((model.base_model if part is None else part).modules()) - {model.get_output_embeddings()}
        self._paths = {
            layer: path
            for path, layer in top.named_modules()
            if layer in inner and path not in _OUTPUTS and _EXPERTS not in path.split(".")
        }
        self._layers: dict[str, tuple[LoraLinear, int]] = {}  # by path, with the index among joined layers

    def wrap(self, layers: Sequence[nn.Module], base: nn.Module) -> nn.Module:
        """Return `base`, which computes these layers of the model, with adapters if it can have any."""
        if any(layer not in self._paths for layer in layers):
            return base
        linear = LoraLinear(base, layers, self)
        self._layers |= {self._paths[layer]: (linear, index) for index, layer in enumerate(layers)}
        return linear

    def make(self, weight: Tensor) -> nn.Module:
        """Return a layer of these weights, [out, in], as fast as the model's own."""
        return make_linear(weight, deterministic=self._deterministic)

    @property
    def nbytes(self) -> dict[torch.device, int]:
        """Bytes of all adapters, by device."""
        return {self.device: sum(linear.nbytes for linear in {linear for linear, _ in self._layers.values()})}

    @contextmanager
    def applied(self, adapters: Tensor) -> Iterator[None]:
        """Within the context a forward applies adapters. adapters: [N] int64, each token's slot; 0: none."""
        slots = torch.arange(1, self.slots + 1, device=adapters.device)
        self.foreign = (adapters[:, None] != slots)[..., None]
        try:
            yield
        finally:
            self.foreign = None

    def check(self, pairs: Mapping[str, LoraPair]) -> None:
        """Raise ConfigError if an adapter, by the paths of layers, is not for this model, or is unfit for it."""
        for path, (down, up) in pairs.items():
            if path not in self._layers and path.endswith(f".{PROJECTION}"):
                raise ConfigError(f"{path} takes no adapters, because its latents are kept; train one without it")
            if path not in self._layers:
                raise ConfigError(f"the model has no linear layer {path!r} that takes adapters; it is another base's")
            linear, index = self._layers[path]
            if (down.shape[1], up.shape[0]) != linear.sizes[index]:
                shape, own = (up.shape[0], down.shape[1]), linear.sizes[index][::-1]
                raise ConfigError(f"{path} is {list(shape)} there, but {list(own)} in the model; it is another base's")
            if len(down) > self.max_rank:
                raise ConfigError(f"its rank is {len(down)}, but max_adapter_rank is {self.max_rank}; raise that")
            if not all(weight.to(self.dtype).isfinite().all() for weight in (down, up)):  # they would spoil every row
                raise ConfigError(f"{path} has weights that are no finite numbers in {self.dtype}")

    @torch.inference_mode()
    def write(self, slot: int, version: str, pairs: Mapping[str, LoraPair]) -> None:
        """Put an adapter, which was checked, into a slot from 1 on, in place of what was there."""
        if slot <= len(self.versions):
            self.versions[slot - 1] = version
        for linear in {linear for linear, _ in self._layers.values()}:
            own: list[LoraPair | None] = [None] * len(linear.sizes)
            for path, (other, index) in self._layers.items():
                if other is linear:
                    own[index] = pairs.get(path)
            linear.write(slot, own)


def _copy_weight(layer: Any, source: Any) -> None:
    """Copy the weight of a layer, which may be packed, into one of the same kind."""
    layer.weight.copy_(source.weight)


def _size(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    assert isinstance(layer, nn.Linear)  # quantised ones are, too
    return layer.in_features, layer.out_features
