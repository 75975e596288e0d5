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


def packed_by_compressed_tensors(bits: int, *, symmetric: bool, group: int | None = GROUP) -> Kind:
    """The pack-quantized layout of compressed-tensors. group: None: a scale for each output."""

    def make(rows: int, size: int, generator: torch.Generator) -> tuple[Tensor, Parts]:
        width = group or size
        codes = torch.randint(1 << bits, (rows, size), generator=generator)
        zeros = torch.randint(1 << bits, (rows, size // width), generator=generator)
        zeros = zeros.new_full(zeros.shape, 1 << bits - 1) if symmetric else zeros
        scales = _scales(rows, size // width, bits, generator).bfloat16()
        weight = scales.float().repeat_interleave(width, 1) * (codes - zeros.repeat_interleave(width, 1))
        parts = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, size]),
        }
        return weight, parts if symmetric else parts | {"weight_zero_point": packed(zeros.T, bits).T.contiguous()}

    return Kind(f"packed-{bits}{'' if symmetric else '-zeros'}", _compressed("pack-quantized", bits, "int"), make)


def integers(*, per_output: bool) -> Kind:
    """The int-quantized layout of compressed-tensors."""

    def make(rows: int, size: int, generator: torch.Generator) -> tuple[Tensor, Parts]:
        codes = torch.randint(-128, 128, (rows, size), generator=generator)
        scales = _scales(rows if per_output else 1, 1, 8, generator)
        stored = scales if per_output else scales[0]
        return scales.float() * codes, {"weight": codes.to(torch.int8), "weight_scale": stored}

    return Kind(f"int8{'' if per_output else '-one-scale'}", _compressed("int-quantized", 8, "int"), make)


def float8(*, block: int | None, compressed: bool = False) -> Kind:
    """Weights of type float8_e4m3fn. block: that shares a scale, in both dimensions; None: an output does."""

    def make(rows: int, size: int, generator: torch.Generator) -> tuple[Tensor, Parts]:
        numbers = (torch.randn(rows, size, generator=generator) * 100).to(torch.float8_e4m3fn)
        shape = (rows, 1) if block is None else (-(-rows // block), -(-size // block))
        scales = (torch.rand(shape, generator=generator) + 0.5) / 1000
        wide = scales.repeat_interleave(block or 1, 0)[:rows].repeat_interleave(block or size, 1)[:, :size]
        suffix = "weight_scale" if compressed or block is None else "weight_scale_inv"
        return wide * numbers.float(), {"weight": numbers, suffix: scales, "input_scale": torch.ones(1)}

    sizes = None if block is None else [block, block]
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": sizes}
    if compressed:
        settings = _compressed("float-quantized", 8, "float", block_structure=sizes)
    return Kind(f"float8-{'compressed-' if compressed else ''}{block}", settings, make)


def _compressed(layout: str, bits: int, kind: str, **options: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, **options}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def _scales(rows: int, groups: int, bits: int, generator: torch.Generator) -> Tensor:
    return ((torch.rand(rows, groups, generator=generator) + 0.5) * 0.4 / (1 << bits)).half()


KINDS = (
    gptq(4, symmetric=True),
    gptq(4, symmetric=False, ordered=False),
    gptq(4, symmetric=False, version=2),
    gptq(8, symmetric=True, ordered=False),
    gptq(8, symmetric=False),
    awq(),
    packed_by_compressed_tensors(4, symmetric=True),
    packed_by_compressed_tensors(4, symmetric=False),
    packed_by_compressed_tensors(8, symmetric=False, group=None),
    integers(per_output=True),
    integers(per_output=False),
    float8(block=None),
    float8(block=40),
    float8(block=32, compressed=True),
    float8(block=None, compressed=True),
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
        if weight.dim() == 2 and name.endswith(".weight") and not any(part in name for part in _PLAIN):
            weights[name], parts = kind.make(len(weight), weight.shape[1], generator)
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file(weights, plain / _FILE, metadata={"format": "pt"})
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": dict(kind.settings)}
    (folder / "config.json").write_text(json.dumps(settings))
    model = loader.from_pretrained(plain, dtype=torch.float32)
    return cast(PreTrainedModel, model.eval())
