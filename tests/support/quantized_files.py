"""Checkpoints of quantised weights, laid out as by the tools that write them, beside the same weights as numbers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

GROUP = 32
_LARGEST_FLOAT8 = 448.0
_FILE = "model.safetensors"
_PLAIN = "embed_tokens", "lm_head", ".gate."  # parts of names; the last is a router's
Parts = dict[str, Tensor]

_FOUR_BITS: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
BITSANDBYTES: Mapping[str, Mapping[str, Any]] = {  # settings that it writes by
    "nf4-stored": _FOUR_BITS | {"bnb_4bit_quant_type": "nf4"},
    "nf4-nested": _FOUR_BITS | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4-in-bfloat16": _FOUR_BITS | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
    "fp4": _FOUR_BITS | {"bnb_4bit_quant_type": "fp4"},
    "llm-int8": {"load_in_8bit": True},
}


class Kind(NamedTuple):
    """A format: its settings in config.json, and what rounds a matrix [out, in], and makes its tensors."""

    name: str
    settings: Mapping[str, Any]
    make: Callable[[Tensor], tuple[Tensor, Parts]]


def packed(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Return int32 words of neighbours in the last dimension. places: of each word's codes; None: in order."""
    count = 32 // bits
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // count, dtype=torch.int64)
    for index, shift in enumerate(places or range(count)):
        words |= codes.long()[..., index::count] << shift * bits
    return words.where(words < 1 << 31, words - (1 << 32)).int()


def gptq(bits: int, *, symmetric: bool, version: int = 1, ordered: bool = True) -> Kind:
    """AutoGPTQ's and GPTQModel's layout. ordered: groups are neighbours."""

    def make(original: Tensor) -> tuple[Tensor, Parts]:
        size = original.shape[1]
        members = torch.arange(size) // GROUP
        if not ordered:
            members = members[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
        order = members.argsort(stable=True)
        codes, scales, zeros = _rounded(original[:, order], bits, GROUP, symmetric=symmetric, least_zero=1)
        codes = codes[:, order.argsort()]
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

    def make(original: Tensor) -> tuple[Tensor, Parts]:
        codes, scales, zeros = _rounded(original, 4, GROUP, symmetric=False)
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

    def make(original: Tensor) -> tuple[Tensor, Parts]:
        rows, size = original.shape
        width = group or size
        codes, scales, zeros = _rounded(original, bits, width, symmetric=symmetric, dtype=torch.bfloat16)
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

    def make(original: Tensor) -> tuple[Tensor, Parts]:
        rows = original if per_output else original.flatten()[None]
        unsigned, scales, _ = _rounded(rows, 8, rows.shape[1], symmetric=True)
        codes = unsigned.view(original.shape) - 128
        stored = scales if per_output else scales[0]
        return scales.float() * codes, {"weight": codes.to(torch.int8), "weight_scale": stored}

    return Kind(f"int8{'' if per_output else '-one-scale'}", _compressed("int-quantized", 8, "int"), make)


def float8(*, block: int | None, compressed: bool = False) -> Kind:
    """Weights of type float8_e4m3fn. block: that shares a scale, in both dimensions; None: an output does."""

    def make(original: Tensor) -> tuple[Tensor, Parts]:
        rows, size = original.shape
        height, width = (1, size) if block is None else (block, block)
        padded = pad(original, (0, -size % width, 0, -rows % height))
        tiles = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # [.., height, .., width]
        scales = tiles.abs().amax(dim=(1, 3)) / _LARGEST_FLOAT8
        wide = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :size]
        numbers = (original / wide).to(torch.float8_e4m3fn)
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


def _rounded(
    weight: Tensor, bits: int, width: int, *, symmetric: bool, least_zero: int = 0, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [out, in], scales and zeros [out, groups]. Weights are about scale · (code − zero).

    weight: [out, in]. width: of a group. symmetric: zeros are the middle code.
    """
    groups = weight.float().unflatten(1, (-1, width))
    least, most = groups.amin(dim=-1).clamp(max=-1e-6), groups.amax(dim=-1).clamp(min=1e-6)
    if symmetric:
        scales = (torch.maximum(-least, most) / ((1 << bits - 1) - 0.5)).to(dtype)
        zeros = torch.full(scales.shape, 1 << bits - 1)
    else:
        scales = ((most - least) / ((1 << bits) - 1)).to(dtype)
        zeros = (-least / scales.float()).round().long().clamp(least_zero, (1 << bits) - 1)
    codes = (groups / scales.float()[..., None]).round().long() + zeros[..., None]
    return codes.clamp(0, (1 << bits) - 1).flatten(1), scales, zeros


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
    return save_rounded(random_model(config), kind, folder)


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model in float32 with the same random weights each time."""
    torch.manual_seed(0)
    loader: Any = AutoModelForCausalLM
    model: PreTrainedModel = loader.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return model


def save_by_bitsandbytes(plain: str | Path, name: str, folder: Path) -> PreTrainedModel:
    """Let transformers save a quantised copy of a model, and return it with the same weights as plain numbers."""
    from transformers.integrations.bitsandbytes import dequantize_and_replace

    loader: Any = AutoModelForCausalLM
    settings = BitsAndBytesConfig(**BITSANDBYTES[name])
    model = loader.from_pretrained(plain, dtype=torch.float32, quantization_config=settings)
    model.save_pretrained(folder)
    states = [getattr(weight, "quant_state", None) for weight in model.parameters()]
    for state in filter(None, states):  # its CPU kernel is wrong where rows end within blocks, so there is but one row
        state.shape = torch.Size([1, state.shape.numel()])
    unpacked = dequantize_and_replace(model.eval(), settings, torch.float32)
    for layer in unpacked.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = layer.weight.data.view(layer.out_features, layer.in_features)
    return cast(PreTrainedModel, unpacked)


def save_rounded(model: PreTrainedModel, kind: Kind, folder: Path) -> PreTrainedModel:
    """Save a model with quantised projections, and return it with the same weights as plain numbers."""
    plain = folder / "plain"
    model.save_pretrained(plain)
    weights = load_file(plain / _FILE)
    tensors = dict(weights)
    for name, weight in weights.items():
        if weight.dim() == 2 and name.endswith(".weight") and not any(part in name for part in _PLAIN):
            weights[name], parts = kind.make(weight.float())
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file(weights, plain / _FILE, metadata={"format": "pt"})
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": dict(kind.settings)}
    (folder / "config.json").write_text(json.dumps(settings))
    loader: Any = AutoModelForCausalLM
    return cast(PreTrainedModel, loader.from_pretrained(plain, dtype=torch.float32).eval())
