"""The output layer of a 16-bit model with logits in float32, unrounded: a bfloat16 logit of 20 comes in steps of 0.125.

Knows nothing of what a model does to its logits afterwards.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from actors.model.fixed_order.layers import FixedOrderLinear, serves
from actors.model.native.library import library
from actors.model.operator_trace import as_one_operator

_PANEL = 64  # columns whose weights lie together


class NativeOutputLayer(nn.Module):
    """A linear layer from bfloat16 to float32 on a CPU. Each result is one sum, in the order of the input features."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [V, H] bfloat16, with an even H; bias: [V]."""
        super().__init__()
        self._columns, size = weight.shape
        padding = -self._columns % _PANEL
        panels = pad(weight.detach(), (0, 0, 0, padding)).view(-1, _PANEL, size // 2, 2)
        self.weight = panels.transpose(1, 2).contiguous()  # [panels, H / 2, panel, 2]
        self.bias = weight.new_zeros(self._columns + padding, dtype=torch.float32)
        if bias is not None:
            self.bias[: self._columns] = bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H] bfloat16; returns [..., V] float32."""
        return _multiply(x, self.weight, self.bias, self._columns)


@as_one_operator
def _multiply(x: Tensor, weight: Tensor, bias: Tensor, columns: int) -> Tensor:
    native = library()
    assert native is not None
    x = x.contiguous()
    output = x.new_empty(*x.shape[:-1], columns, dtype=torch.float32)
    native.output_layer_bfloat16(
        *(x.data_ptr(), weight.data_ptr(), bias.data_ptr()),
        *(x.shape[:-1].numel(), x.shape[-1], columns, torch.get_num_threads()),
        output.data_ptr(),
    )
    return output


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
    elif weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and library():
        kind = NativeOutputLayer
    if kind is not None:
        path = next(path for path, module in model.named_modules() if module is head)
        model.set_submodule(path, kind(weight, head.bias))
