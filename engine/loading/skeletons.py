"""Models on the meta device, made without torch's references in Python, which import sympy: half a second, 33 MB."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_FILLS = {nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.constant_}  # that modes see


class QuickSkeletons(TorchFunctionMode):
    """In its block modules on the meta device fill no weights, and compute positions for real, as long as they can."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _FILLS and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        if function is torch.arange and torch.device(kwargs.get("device") or "cpu").type == "meta":
            kwargs["device"] = "cpu"
        try:
            return function(*args, **kwargs)
        except RuntimeError:
            given = tuple(args), kwargs
            if not any(isinstance(each, Tensor) and each.is_meta for each in tree_leaves(given)):
                raise
            args, kwargs = tree_map_only(Tensor, lambda each: each.to("meta"), given)
            return function(*args, **kwargs)
