"""The layouts in which Medusa heads are stored: versions 1 and 2 of the paper's code, and vLLM's.

The heads are counted in the weights, because configurations often name another number.
"""

import re
from collections.abc import Callable

import torch

from engine.heads.checkpoint import HeadsCheckpoint
from engine.heads.medusa import MedusaHeads

_OWN_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_VLLM_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")

Name = Callable[[int, int], str]  # of a head's layer


def read_medusa(checkpoint: HeadsCheckpoint, *, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """Return the heads. hidden_size, vocab_size: the target's.

    Raises:
        ConfigError: a tensor is missing, surplus, or of another size.
    """
    is_vllm = any(_VLLM_LAYER.fullmatch(name) for name in checkpoint.tensors)
    pattern = _VLLM_LAYER if is_vllm else _OWN_LAYER
    matches = [match for name in checkpoint.tensors if (match := pattern.fullmatch(name))]
    if not matches:
        raise checkpoint.error("has no Medusa heads: neither 0.0.linear.weight nor blocks.0.layers.0.weight")
    heads = 1 + max(int(match[1]) for match in matches)
    layers = 1 + max(int(match[2]) for match in matches)
    weight_of: Name = _vllm_weight if is_vllm else _own_weight
    output_of: Name = _vllm_output if is_vllm else _own_output
    has_outputs = is_vllm or output_of(0, layers) in checkpoint.tensors
    biased = _bias(weight_of(0, 0)) in checkpoint.tensors
    weights = [weight_of(head, layer) for head in range(heads) for layer in range(layers)]
    biases = [_bias(name) for name in weights] if biased else []
    outputs = [output_of(head, layers) for head in range(heads)] if has_outputs else []
    checkpoint.check_names([*weights, *biases, *outputs], ignored={"token_map"} if is_vllm else ())
    token_map = checkpoint.tensors.get("token_map")
    if token_map is not None:
        token_map = token_map.long()
        if not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size:
            raise checkpoint.error(f"token_map names tokens outside the target's vocabulary of {vocab_size}")
    width = vocab_size if token_map is None else len(token_map)
    module = MedusaHeads(
        heads,
        layers,
        hidden_size,
        outputs=width if has_outputs else None,
        token_map=token_map,
        vocab_size=vocab_size,
    )
    module.weight.data = _stack(checkpoint, weights, hidden_size, hidden_size).unflatten(0, (heads, layers))
    if biased:
        module.bias.data = _stack(checkpoint, biases, hidden_size).unflatten(0, (heads, layers))
    if module.output is not None:
        module.output.data = _stack(checkpoint, outputs, width, hidden_size)
    return module


def _stack(checkpoint: HeadsCheckpoint, names: list[str], *shape: int) -> torch.Tensor:
    return torch.stack([checkpoint.check_shape(name, *shape) for name in names])


def _own_weight(head: int, layer: int) -> str:
    return f"{head}.{layer}.linear.weight"


def _own_output(head: int, layer: int) -> str:
    return f"{head}.{layer}.weight"


def _vllm_weight(head: int, layer: int) -> str:
    return f"blocks.{head}.layers.{layer}.weight"


def _vllm_output(head: int, layer: int) -> str:
    return f"lm_heads.{head}.weight"


def _bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
