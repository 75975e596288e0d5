"""Rotary position embedding in one pass over queries and keys; transformers' takes ten.

All transformers models call it by the same name, each from its own module. That name gets another meaning in the
`forward` of one model's attention layers; the module stays as it is.
"""

from collections.abc import Callable, Collection
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.native import KINDS, call, empty, is_recording, library, native_operator, structure

_CALLED = "apply_rotary_pos_emb"
_ROUNDED = (torch.bfloat16, torch.float16)
_DTYPES_ON_GPU = (torch.float32, *_ROUNDED)

Rotate = Callable[..., tuple[Tensor, Tensor]]


_Call = structure(
    "tokens heads kv_heads head_dim threads query_token query_head key_token key_head "
    "*query *key *cos *sin *to_query *to_key"
)


class NativeRotary:
    """Su et al., arXiv 2104.09864, in the half-split form of GPT-NeoX, with transformers' rounding."""

    def __init__(self, original: Rotate) -> None:
        """original: the function that this one replaces; it still computes all other inputs."""
        self._original = original

    def __call__(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Rotate q [1, heads, N, D] and k [1, kv_heads, N, D] by cos and sin [1, N, D]; return both."""
        if options or len(given) != 4 or not _can_rotate(*given):
            return self._original(*given, **options)
        if given[0].is_cuda:
            from engine.kernels.triton_elementwise import rotate

            return rotate(*given)
        return _rotate(*given)


@native_operator
def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    _, heads, tokens, head_dim = q.shape
    to_q = empty(1, tokens, heads, head_dim, dtype=q.dtype)
    to_k = empty(1, tokens, k.shape[1], head_dim, dtype=k.dtype)
    arguments = _Call(
        *(tokens, heads, k.shape[1], head_dim, torch.get_num_threads()),
        *(q.stride(2), q.stride(1), k.stride(2), k.stride(1)),
        *(x.data_ptr() for x in (q, k, cos, sin, to_q, to_k)),
    )
    call(f"rotate_{KINDS[q.dtype]}", arguments)
    return to_q.transpose(1, 2), to_k.transpose(1, 2)


def _can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the tensors are a batch of one of a dtype that can be rotated, with rotation over the full head."""
    return (
        q.dtype in (_DTYPES_ON_GPU if q.is_cuda else KINDS)
        and (q.is_cuda or (q.device.type == "cpu" and library() is not None))
        and q.device == k.device == cos.device == sin.device
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.dim() == k.dim() == 4
        and len(q) == 1
        and cos.shape == sin.shape == (1, q.shape[2], q.shape[3])
        and q.shape[2:] == k.shape[2:]
        and q.stride(3) == k.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


@torch.no_grad()
def replace_rotary(model: nn.Module) -> None:
    """Let the attention layers below `model` rotate in one pass, if their own function agrees on random inputs."""
    devices = {parameter.device for parameter in model.parameters()}
    devices = {device for device in devices if device.type == "cuda" or (device.type == "cpu" and library())}
    if not devices:
        return
    faster = {kind: _with_native_rotary(kind.forward, devices) for kind in {type(layer) for layer in model.modules()}}
    for layer in model.modules():
        forward = faster[type(layer)]
        if forward is not None and "forward" not in vars(layer):
            layer.forward = MethodType(forward, layer)


def _with_native_rotary(forward: Callable[..., object], devices: Collection[torch.device]) -> FunctionType | None:
    """Return the function with our rotation; None if it calls none, or one that gives something else."""
    if not isinstance(forward, FunctionType) or _CALLED not in forward.__code__.co_names:
        return None
    original = forward.__globals__.get(_CALLED)
    if original is None or not all(_agrees(original, device) for device in devices):
        return None
    meanings = {**forward.__globals__, _CALLED: NativeRotary(original)}
    faster = FunctionType(forward.__code__, meanings, forward.__name__, forward.__defaults__, forward.__closure__)
    faster.__kwdefaults__ = forward.__kwdefaults__
    return faster


def _agrees(original: Rotate, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, count, 3, 8, generator=generator) for count in (4, 2)]
    angles = [torch.randn(1, 3, 8, generator=generator) for _ in range(2)]
    for dtype in (torch.float32, *_ROUNDED):
        given = [x.to(device, dtype) for x in (*heads, *angles)]
        try:
            expected = original(*given)
        except Exception:  # it takes other arguments
            return False
        result = NativeRotary(original)(*given)
        agree = torch.equal if dtype in _ROUNDED else torch.allclose
        if not all(x.dtype == y.dtype and agree(x, y) for x, y in zip(result, expected, strict=True)):
            return False
    return True


_AnglesCall = structure("*positions tokens half *frequencies .scaling *cos *sin")


@torch.no_grad()
def use_native_angles(module: nn.Module) -> None:
    """Let rotary embeddings below a module on a CPU compute their angles in one native call where calls are recorded.

    They may differ from torch's in the last bit, so it is for modules that draft only.
    """
    for part in module.modules():
        frequencies = getattr(part, "inv_freq", None)
        varies = getattr(part, "rope_type", "") in ("dynamic", "longrope")
        if isinstance(frequencies, Tensor) and not varies and all(_angles_agree(part, dtype) for dtype in KINDS):
            part.forward = MethodType(partial(_native_angles, part.forward), part)


def _angles_agree(part: Any, dtype: torch.dtype) -> bool:
    positions = torch.tensor([[0, 1, 5, 1000]])
    try:
        expected = part(torch.zeros(1, dtype=dtype), positions)
    except Exception:  # it takes other arguments
        return False
    for ours, theirs in zip(_angles(part, positions, dtype), expected, strict=True):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape) or not torch.allclose(ours, theirs, rtol=1e-2):
            return False
    return True


def _native_angles(original: Callable[..., Any], part: nn.Module, x: Tensor, position_ids: Tensor) -> Any:
    """x: its dtype is that of the angles. position_ids: [1, N], or [3, 1, N]. Returns cosines and sines, [1, N, D]."""
    if not is_recording() or x.dtype not in KINDS or position_ids.dim() != 2 or len(position_ids) != 1:
        return original(x, position_ids)
    return _angles(part, position_ids, x.dtype)


def _angles(part: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies, scaling = part.inv_freq.float().contiguous(), float(getattr(part, "attention_scaling", 1.0))
    sizes = positions.numel(), len(frequencies)
    cos, sin = (empty(1, len(positions[0]), 2 * len(frequencies), dtype=dtype) for _ in range(2))
    inputs = positions.data_ptr(), *sizes, frequencies.data_ptr(), scaling
    call(f"angles_{KINDS[dtype]}", _AnglesCall(*inputs, cos.data_ptr(), sin.data_ptr()))
    return cos, sin
