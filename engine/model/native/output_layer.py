"""The output layer of a 16-bit model with logits in float32, unrounded: a bfloat16 logit of 20 comes in steps of 0.125.

Knows nothing of what a model does to its logits afterwards.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.model.fixed_order.layers import FixedOrderLinear, serves
from engine.model.native.linear import NativeLinear, has_kernel


class CudaOutputLayer(nn.Module):
    """The same on a GPU, by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [V, H]; bias: [V]."""
        super().__init__()
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H]; returns [..., V] float32."""
        logits = torch.mm(x.flatten(0, -2), self.weight.T, out_dtype=torch.float32)
        return (logits if self.bias is None else logits.add_(self.bias)).view(*x.shape[:-1], -1)


def replace_output_layer(model: PreTrainedModel, *, deterministic: bool = True) -> None:
    """Let the output layer give float32, if it is a plain 16-bit layer. On a CPU that takes bfloat16 and a compiler."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or hasattr(head, "_hf_hook"):
        return
    weight = head.weight
    kind: Callable[[Tensor, Tensor | None], nn.Module] | None = None
    if deterministic and serves(weight):
        kind = partial(FixedOrderLinear, out_dtype=torch.float32)
    elif weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16):
        kind = CudaOutputLayer
    elif weight.dtype == torch.bfloat16 and has_kernel(weight):
        kind = partial(NativeLinear, out_dtype=torch.float32)
    if kind is not None:
        path = next(path for path, module in model.named_modules() if module is head)
        model.set_submodule(path, kind(weight, head.bias))
