"""Reads the quantised matrices of other tools' checkpoints as `QuantizedWeight`; each weight keeps its value.

Sources: AutoGPTQ's and GPTQModel's `QuantLinear.pack`, AutoAWQ's `WQLinear_GEMM`, compressed-tensors' compressors,
bitsandbytes' `QuantState` and `Int8Params`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import QuantizedWeight, pack_codes

Parts = Mapping[str, Any]  # what a module has in the files, by the last part of its name: slices of safetensors
_WORD = 32  # bits
_BITS = (4, 8)
_LEAST_GROUP = 16  # inputs, for kernels of all devices
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # the numbers of MXFP4's codes …
_POWERS = torch.tensor([2.0**exponent for exponent in range(-127, 128)] + [torch.nan])  # … and of its scales
_AWQ_COLUMNS = 0, 4, 1, 5, 2, 6, 3, 7  # where in a word the next column's code is


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised matrix in files, or one for each expert. `read` returns it; `like` is the same on the meta device."""

    like: QuantizedWeight
    read: Callable[[], QuantizedWeight]
    is_turned: bool = False  # the model's parameter is its transpose

    def regrouped(self, ranks: int) -> "StoredWeight":
        """Return the same numbers in groups that ranks can share evenly, if these don't become too small for it."""
        factor = ranks // gcd(ranks, self.like.scales.shape[-1])
        if factor == 1 or self.like.group % (factor * _LEAST_GROUP):
            return self
        return replace(self, like=self.like.regrouped(factor), read=lambda: self.read().regrouped(factor))


Reader = Callable[[Parts], StoredWeight | None]  # None: the module is not quantised


def quantized_reader(config: PretrainedConfig) -> Reader | None:
    """Return what reads the modules of a checkpoint; None: it is not quantised, or transformers reads it.

    Raises ConfigError if neither can read it.
    """
    stored = getattr(config, "quantization_config", None)
    if not stored:
        return None
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    unnamed = "bitsandbytes" if settings.get("load_in_8bit") or settings.get("load_in_4bit") else "an unnamed method"
    method = str(settings.get("quant_method") or unnamed)
    if method == "consort":
        return None
    if method not in _READERS:
        raise ConfigError(f"its weights are quantised by {method}, which can't be read; {_NEAREST}")
    return _READERS[method](settings)


def stores_integers(config: PretrainedConfig) -> bool:
    """Whether a checkpoint that `quantized_reader` accepts has layers of integers in groups."""
    settings = getattr(config, "quantization_config", None)
    if not isinstance(settings, dict) or not (
        settings.get("quant_method") in _INTEGERS or settings.get("load_in_8bit")
    ):
        return False
    schemes = (settings.get("config_groups") or {}).values()
    kinds = {scheme["weights"].get("type", "int") for scheme in schemes if scheme.get("weights")}
    return kinds != {"float"}


def _gptq(settings: Mapping[str, Any]) -> Reader:
    kind = settings.get("checkpoint_format") or "gptq"
    if kind not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise ConfigError(f"its GPTQ weights are laid out as {kind}, which can't be read; save them as gptq")
    _check_bits("GPTQ", settings.get("bits", 4))
    shift = 1 if kind == "gptq" else 0  # what the first version subtracts from zeros

    def read(parts: Parts) -> StoredWeight | None:
        if "qweight" not in parts:
            return None
        words, rows = parts["qweight"].get_shape()
        members = parts["g_idx"][...].long() if "g_idx" in parts else None
        bits = settings["bits"] if members is None else words * _WORD // len(members)
        _check_bits("GPTQ", bits)
        groups = parts["scales"].get_shape()[0]
        order = None if members is None else _order(members, groups)
        zeros = (_unpacked(parts["qzeros"][...], bits) + shift) & ((1 << bits) - 1)
        offsets = bool((zeros != 1 << bits - 1).any())

        def weight() -> QuantizedWeight:
            codes = _in_order(_octets(parts["qweight"][...].T), order, bits)
            return _weight(codes, parts["scales"][...].T, zeros.T if offsets else None, bits, order)

        like = _like(rows, words * _WORD // bits, groups, bits, parts["scales"], offsets=offsets, order=order)
        return StoredWeight(like, weight)

    return read


def _awq(settings: Mapping[str, Any]) -> Reader:
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise ConfigError(f"its AWQ weights are laid out as {version}, which can't be read; save them as gemm")
    if settings.get("bits", settings.get("w_bit", 4)) != 4:
        raise ConfigError("its AWQ weights don't have 4 bits, and only those can be read")

    def read(parts: Parts) -> StoredWeight | None:
        if "qweight" not in parts:
            return None
        size, words = parts["qweight"].get_shape()
        rows, groups = words * 8, parts["scales"].get_shape()[0]

        def unpacked(name: str) -> Tensor:
            codes: Tensor = _unpacked(parts[name][...], 4).unflatten(1, (-1, 8))
            return codes[..., list(_AWQ_COLUMNS)].flatten(1).T

        def weight() -> QuantizedWeight:
            codes = pack_codes(unpacked("qweight").contiguous(), 4)
            return _weight(codes, parts["scales"][...].T, unpacked("qzeros"), 4, None)

        return StoredWeight(_like(rows, size, groups, 4, parts["scales"], offsets=True, order=None), weight)

    return read


def _compressed_tensors(settings: Mapping[str, Any]) -> Reader:
    schemes = list((settings.get("config_groups") or {}).values())
    layouts = {settings.get("format"), *(scheme.get("format") for scheme in schemes)} - {None}
    if unread := sorted(layouts - _COMPRESSED):
        raise ConfigError(
            f"its weights are compressed as {unread[0]}; only {', '.join(sorted(_COMPRESSED))} can be read"
        )
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense" or settings.get("transform_config"):
        raise ConfigError("its weights are sparse or rotated, which can't be read; save them dense, without transforms")
    weights = [scheme["weights"] for scheme in schemes if scheme.get("weights")]
    for each in weights:
        _check_bits("compressed", each["num_bits"])
    blocks = [each["block_structure"] for each in weights if each.get("block_structure")]
    block = blocks[0] if blocks else None

    def read(parts: Parts) -> StoredWeight | None:
        if "weight_packed" in parts:
            return _read_packed(parts)
        return _read_octets(parts, parts["weight_scale"], block) if "weight_scale" in parts else None

    return read


def _read_packed(parts: Parts) -> StoredWeight:
    rows, words = parts["weight_packed"].get_shape()
    size = int(parts["weight_shape"][...][-1])
    bits = words * _WORD // size
    _check_bits("compressed", bits)
    members = parts["weight_g_idx"][...].long() if "weight_g_idx" in parts else None
    order = None if members is None or bool((members < 0).any()) else _order(members, _columns(parts["weight_scale"]))

    def weight() -> QuantizedWeight:
        codes = _in_order(_octets(parts["weight_packed"][...])[:, : size * bits // 8], order, bits)
        stored, zeros = parts.get("weight_zero_point"), None
        scales = _in_groups(parts["weight_scale"][...], rows, size, None)
        if stored is not None:  # packed along rows
            zeros = _in_groups(_unpacked(stored[...].T, bits).T[:rows], rows, size, None)
        return _weight(codes, scales, zeros, bits, order)

    scale, offsets = parts["weight_scale"], "weight_zero_point" in parts
    return StoredWeight(_like(rows, size, _columns(scale), bits, scale, offsets=offsets, order=order), weight)


def _fp8(settings: Mapping[str, Any]) -> Reader:
    block = settings.get("weight_block_size")

    def read(parts: Parts) -> StoredWeight | None:
        scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
        return None if scale is None else _read_octets(parts, scale, block)

    return read


def _read_octets(parts: Parts, scale: Any, block: Sequence[int] | None, *, unit: float = 1.0) -> StoredWeight | None:
    """Read signed integers or FP8 numbers. block: rows and inputs of a block, if each block has a scale."""
    kind = parts["weight"].get_dtype() if "weight" in parts else None
    if kind not in ("I8", "F8_E4M3"):
        return None
    *experts, rows, size = parts["weight"].get_shape()
    floats = kind == "F8_E4M3"

    def grouped(numbers: Tensor) -> Tensor:
        if not experts:
            return _in_groups(numbers, rows, size, block)
        return torch.stack([_in_groups(own, rows, size, block) for own in numbers])

    def weight() -> QuantizedWeight:
        octets, scales = parts["weight"][...].view(torch.uint8), grouped(scale[...]) * unit
        if floats:
            wide = scales.float().contiguous()
            return QuantizedWeight(codes=octets, scales=wide, offsets=None, bits=8, floats=True)
        stored = parts.get("weight_zero_point")
        zeros = None if stored is None else grouped(stored[...].float()) + 128
        return _weight(octets ^ 128, scales, zeros, 8, None)

    groups = grouped(torch.empty(scale.get_shape(), device="meta")).shape[-1]
    like = _like((*experts, rows), size, groups, 8, scale, offsets="weight_zero_point" in parts, order=None)
    if floats:
        like = replace(like, floats=True, scales=like.scales.float(), offsets=None)
    return StoredWeight(like, weight)


def _mxfp4(settings: Mapping[str, Any]) -> Reader:
    def read(parts: Parts) -> StoredWeight | None:
        if "blocks" not in parts:
            return None
        codes = torch.empty(parts["blocks"].get_shape(), dtype=torch.uint8, device="meta").flatten(-2)
        scales = torch.empty(parts["scales"].get_shape(), device="meta")
        like = QuantizedWeight(codes=codes, scales=scales, offsets=None, bits=4, table=_E2M1)

        def weight() -> QuantizedWeight:
            scales = _POWERS[parts["scales"][...].int()]
            return replace(like, codes=parts["blocks"][...].flatten(-2), scales=scales, table=_E2M1.clone())

        return StoredWeight(like, weight, is_turned=True)

    return read


def _bitsandbytes(settings: Mapping[str, Any]) -> Reader:
    def read(parts: Parts) -> StoredWeight | None:
        if "weight_format" in parts and bool(parts["weight_format"][...]):
            raise ConfigError("its LLM.int8 weights are laid out for old GPUs; save them again by bitsandbytes 0.45")
        if "SCB" in parts:
            return _read_octets(parts, parts["SCB"], None, unit=1 / 127)
        state = next((part for part in parts if part.startswith("quant_state.")), None)
        return None if state is None else _read_blocks(parts, json.loads(bytes(parts[state][...].tolist())))

    return read


def _read_blocks(parts: Parts, state: Mapping[str, Any]) -> StoredWeight:
    """Read numbers of 4 bits, in blocks of a matrix without its rows. state: what bitsandbytes notes of them."""
    *rows, size = state["shape"]
    if size % 2:
        raise ConfigError(
            f"its bitsandbytes weights {state['shape']} have an odd number of inputs, which can't be read"
        )
    block = state["blocksize"]
    group = gcd(size, block)  # smaller than a block where rows end within one
    like = _like(tuple(rows), size, size // group, 4, parts["quant_map"], offsets=False, order=None)
    like = replace(like, scales=like.scales.float(), table=parts["quant_map"][...].float())

    def weight() -> QuantizedWeight:
        octets, scales = parts["weight"][...].flatten().view(torch.uint8), parts["absmax"][...]
        if "nested_absmax" in parts:
            factors = parts["nested_absmax"][...].repeat_interleave(state["nested_blocksize"])[: len(scales)]
            scales = parts["nested_quant_map"][...][scales.int()] * factors + state["nested_offset"]
        grouped = scales.float().repeat_interleave(block // group)[: like.scales.numel()]
        return replace(
            like,
            codes=(octets >> 4 | octets << 4).view(like.codes.shape),  # the first of two is in the upper half
            scales=grouped.view(like.scales.shape),
        )

    return StoredWeight(like, weight)


def _in_groups(scales: Tensor, rows: int, size: int, block: Sequence[int] | None) -> Tensor:
    """Return scales [rows, groups] for groups of one size. scales: one for all, [rows, groups], or one per block."""
    table = scales.reshape(len(scales), -1) if scales.dim() else scales.reshape(1, 1)
    if table.numel() == 1:
        return table.expand(rows, 1)
    if block is not None and table.shape == (-(-rows // block[0]), -(-size // block[1])):
        group = gcd(size, block[1])  # smaller than a block where the last one is cut
        return table.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1] // group, 1)[:, : size // group]
    if len(table) != rows or size % table.shape[1]:
        raise ValueError(f"scales of shape {list(scales.shape)} don't fit a matrix [{rows}, {size}]")
    return table


def _columns(scale: Any) -> int:
    """Return the groups of inputs. scale: a slice of [1] or [out, groups]."""
    shape = scale.get_shape()
    return int(shape[1]) if len(shape) > 1 else 1


def _check_bits(name: str, bits: int) -> None:
    if bits not in _BITS:
        raise ConfigError(f"its {name} weights have {bits} bits; only 4 and 8 can be read")


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes in words, lowest bits first. words: [..., n] int32; returns [..., n · 32 / bits] uint8."""
    octets = _octets(words)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def _octets(words: Tensor) -> Tensor:
    """Return the bytes of words, lowest first. words: [..., n] int32; returns [..., 4 n] uint8."""
    return words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)


def _order(members: Tensor, groups: int) -> Tensor | None:
    """Return the inputs in the order of their groups; None: they are in order. members: [in], each input's group.

    Raises ValueError if groups differ in size.
    """
    counts = members.bincount(minlength=groups)
    if len(counts) != groups or not bool((counts == counts[0]).all()):
        raise ValueError(f"groups of inputs differ in size: {counts.tolist()[:4]}, …")
    if bool((members.diff() >= 0).all()):
        return None
    return members.argsort(stable=True)


def _in_order(codes: Tensor, order: Tensor | None, bits: int) -> Tensor:
    """Return packed codes in another order of columns. codes: [out, in · bits / 8]."""
    if order is None:
        return codes
    apart = codes if bits == 8 else torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    return pack_codes(apart[:, order], bits)


def _weight(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, order: Tensor | None) -> QuantizedWeight:
    """Return scale · (code − zero). codes: packed; scales and zeros: [out, groups]."""
    if zeros is None:
        kept = scales if scales.dtype == torch.float16 else scales.float()
        return QuantizedWeight(codes=codes, scales=kept.contiguous(), offsets=None, bits=bits, order=order)
    wide = scales.float().contiguous()
    return QuantizedWeight(codes=codes, scales=wide, offsets=-wide * zeros.float(), bits=bits, order=order)


def _like(
    rows: int | tuple[int, ...], size: int, groups: int, bits: int, scales: Any, *, offsets: bool, order: Tensor | None
) -> QuantizedWeight:
    rows = (rows,) if isinstance(rows, int) else rows
    dtype = torch.float16 if scales.get_dtype() == "F16" and not offsets else torch.float32
    with torch.device("meta"):
        return QuantizedWeight(
            codes=torch.empty(*rows, size * bits // 8, dtype=torch.uint8),
            scales=torch.empty(*rows, groups, dtype=dtype),
            offsets=torch.empty(*rows, groups, dtype=dtype) if offsets else None,
            bits=bits,
            order=None if order is None else torch.empty(size, dtype=torch.int64),
        )


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Reader]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
_INTEGERS = {"gptq", "awq", "compressed-tensors", "consort", "mxfp4"}
_COMPRESSED = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
_NEAREST = (
    "GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8 and GGUF can, and `quantization: int4` rounds plain weights"
)
