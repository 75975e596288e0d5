"""Checkpoints of quantised weights, laid out as by the tools that write them, beside the same weights as numbers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

GROUP = 32
_FILE = "model.safetensors"
_PLAIN = "embed_tokens", "lm_head", ".gate."  # parts of names; the last is a router's
Parts = dict[str, Tensor]


class Kind(NamedTuple):
    """A format: its settings in config.json, and what makes a random matrix [out, in] and its tensors."""

    name: str
    settings: Mapping[str, Any]
    make: Callable[[int, int, torch.Generator], tuple[Tensor, Parts]]


def packed(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Return int32 words of neighbours in the last dimension. places: of each word's codes; None: in order."""
    count = 32 // bits
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // count, dtype=torch.int64)
    for index, shift in enumerate(places or range(count)):
        words |= codes.long()[..., index::count] << shift * bits
    return words.where(words < 1 << 31, words - (1 << 32)).int()


def gptq(bits: int, *, symmetric: bool, version: int = 1, ordered: bool = True) -> Kind:
    """AutoGPTQ's and GPTQModel's layout. ordered: groups are neighbours."""

    def make(rows: int, size: int, generator: torch.Generator) -> tuple[Tensor, Parts]:
        codes = torch.randint(1 << bits, (rows, size), generator=generator)
        zeros = torch.randint(1, 1 << bits, (rows, size // GROUP), generator=generator)
        zeros = zeros.new_full(zeros.shape, 1 << bits - 1) if symmetric else zeros
        scales = _scales(rows, size // GROUP, bits, generator)
        members = torch.arange(size) // GROUP
        if not ordered:
            members = members[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
        weight = scales.float()[:, members] * (codes - zeros[:, members])
        stored = zeros - 1 if version == 1 else zeros
        return weight, {
            "qweight": packed(codes, bits).T.contiguous(),  # neighbours are inputs
            "qzeros": packed(stored.T.contiguous(), bits),  # neighbours are outputs
            "scales": scales.T.contiguous(),
            "g_idx": members.int(),
        }

    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": not ordered}
    settings |= {} if version == 1 else {"checkpoint_format": "gptq_v2"}
    return Kind(f"gptq-{bits}{'' if symmetric else '-zeros'}{'' if ordered else '-order'}-v{version}", settings, make)


def awq() -> Kind:
    """AutoAWQ's layout for its GEMM kernel."""

    def make(rows: int, size: int, generator: torch.Generator) -> tuple[Tensor, Parts]:
        codes = torch.randint(16, (rows, size), generator=generator)
        zeros = torch.randint(16, (rows, size // GROUP), generator=generator)
        scales = _scales(rows, size // GROUP, 4, generator)
        weight = scales.float().repeat_interleave(GROUP, 1) * (codes - zeros.repeat_interleave(GROUP, 1))
        places = 0, 4, 1, 5, 2, 6, 3, 7
        return weight, {
            "qweight": packed(codes.T.contiguous(), 4, places),
            "qzeros": packed(zeros.T.contiguous(), 4, places),
            "scales": scales.T.contiguous(),
        }

    return Kind("awq", {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, make)


def _scales(rows: int, groups: int, bits: int, generator: torch.Generator) -> Tensor:
    return ((torch.rand(rows, groups, generator=generator) + 0.5) * 0.4 / (1 << bits)).half()


KINDS = (
    gptq(4, symmetric=True),
    gptq(4, symmetric=False, ordered=False),
    gptq(4, symmetric=False, version=2),
    gptq(8, symmetric=True, ordered=False),
    gptq(8, symmetric=False),
    awq(),
)


def save_quantized(config: PretrainedConfig, kind: Kind, folder: Path) -> PreTrainedModel:
    """Save a random model with quantised projections, and return it with the same weights as plain numbers."""
    torch.manual_seed(0)
    plain = folder / "plain"
    loader: Any = AutoModelForCausalLM
    unquantised = loader.from_config(config, dtype=torch.float32)
    unquantised.save_pretrained(plain)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(plain / _FILE)
    tensors = dict(weights)
    for name, weight in weights.items():
        if weight.dim() == 2 and not any(part in name for part in _PLAIN):
            weights[name], parts = kind.make(len(weight), weight.shape[1], generator)
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file(weights, plain / _FILE, metadata={"format": "pt"})
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": dict(kind.settings)}
    (folder / "config.json").write_text(json.dumps(settings))
    model = loader.from_pretrained(plain, dtype=torch.float32)
    return cast(PreTrainedModel, model.eval())
