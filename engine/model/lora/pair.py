"""The weights of an adapter for one layer. Imports no layers, so that a coordinator can read adapters without them."""

from typing import NamedTuple

from torch import Tensor


class LoraPair(NamedTuple):
    """The adapter of one linear layer: W + up · down."""

    down: Tensor  # [r, in]
    up: Tensor  # [out, r], scaled
