"""Replaces a served model's weights in place: its tensors stay where graphs and traces read them.

Must not know where the new weights come from.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


@torch.inference_mode()
def copy_weights(model: nn.Module, source: nn.Module) -> None:
    """Copy all tensors of `source` into a model of the same layers, packed ones too.

    Raises:
        ValueError: they are not alike. Nothing was copied then.
    """
    present, fresh = list(_tensors(model)), list(_tensors(source))
    if len(present) != len(fresh):
        raise ValueError(f"the new weights are {len(fresh)} tensors, not {len(present)}")
    pairs = list(zip(present, fresh, strict=True))
    for old, new in pairs:
        if (old.shape, old.dtype, old.device, old.layout) != (new.shape, new.dtype, new.device, new.layout):
            raise ValueError(f"a new weight is {new.dtype} {list(new.shape)}, not {old.dtype} {list(old.shape)}")
    for old, new in pairs:
        old.copy_(new)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers, and the tensors that are plain attributes of modules: faster layers have those."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))
