"""How large a model is, from the headers of its checkpoint."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoding.errors import ConfigError
from deployments.configuration.model import ModelConfig
from deployments.configuration.paths import positions_of, read_header, tensors_in
from engine.loading.gguf.files import converted_folder, is_gguf, local_file, stored_bytes

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_QUANTIZED_BYTES = {"nf4": 0.5625, "int4": 0.5625, "int8": 1.0625}  # of a weight, scales included
_KEPT = re.compile(r"embed|lm_head|wte|wpe|\.experts\.|_embd|^output\.")  # in names of matrices that are not quantised
_ENDS = re.compile(r"embed_tokens|lm_head|wte|token_embd|^output\.")  # `int4` and `nf4` keep these in 8 bits
_OUTPUT = re.compile(r"lm_head|embed_out|^output\.")  # where there is one, the embedding is not the output layer
_LOOKED_UP = re.compile(r"embed_tokens|embed_in\.|wte|wpe|token_embd")  # of which a step reads a row for each token
_EXPERTS = re.compile(r"\.experts\.|_exps\.")
_OTHER_PARTS = re.compile(r"(^|\.)(vision|visual|audio|embed_vision|embed_audio|multi_modal)")  # of multimodal models
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_ATTENTIONS = {"longcat_flash": 2, "diffllama": 2}  # of one layer, by model type, where it has several
_GGUF_FIELDS = {  # what config.json calls them, and .gguf files
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "hidden_size": "embedding_length",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
_FEW = 2**30 // 10  # bytes, below which they are shown in MiB
_Tensors = Mapping[str, tuple[Sequence[int], float]]  # shape and stored bytes, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Estimates from a checkpoint's headers; None: unknown."""

    weights_bytes: int
    kv_bytes: int | None = None  # keys and values of one token, in all layers
    positions: int | None = None
    step_bytes: int | None = None  # of the weights: what a step with one token reads

    @property
    def bytes_per_token(self) -> str | None:
        """What a token reads, in words; None if unknown."""
        if self.step_bytes is None or self.kv_bytes is None:
            return None
        return f"a token reads {shown_size(self.step_bytes)}, and {self.kv_bytes / 2**10:.1f} KiB for each before it"


def shown_size(size: int) -> str:
    """Return bytes in GiB, or a few in MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= _FEW else f"{size / 2**20:.1f} MiB"


def size_of(model: ModelConfig, path: str, *, weights_bytes: int | None = None) -> ModelSize | None:
    """Return a model's size; None if its headers are not here, or don't tell. Raises ConfigError if one is damaged.

    path: its folder or file on this machine.
    weights_bytes: of the stored weights, where they are known but not in the folder.
    """
    if is_gguf(path):
        folder, file = converted_folder(path, model.dtype, unpacked=model.unpacks), local_file(path)
        if folder is None:
            return None if file is None else _size_of_gguf(file, model)
        path, weights_bytes = str(folder), None
    return _size_of_folder(Path(path), model, weights_bytes) if Path(path).is_dir() else None


def _size_of_folder(folder: Path, model: ModelConfig, weights_bytes: int | None) -> ModelSize | None:
    config = read_header(folder)
    files = list(folder.glob("model*.safetensors")) or folder.glob("*.safetensors")  # some have all weights twice
    stored_tensors = (each for file in files for each in tensors_in(file).items())
    tensors: _Tensors = {name: tensor for name, tensor in stored_tensors if not _OTHER_PARTS.search(name)}
    stored = sum(size for _, size in tensors.values()) or weights_bytes
    return _size(config, model, tensors, stored) if stored else None


def _size_of_gguf(file: Path, model: ModelConfig) -> ModelSize:
    """Return the size that a file will have, converted, by its own header."""
    from engine.loading.gguf.header import Header

    try:
        header = Header(file)
        config = {key: value for key, field in _GGUF_FIELDS.items() if (value := header.take(field)) is not None}
        if isinstance(heads := config.get("num_key_value_heads"), list):  # 0 in layers that carry a state
            config |= {"num_hidden_layers": len([*filter(None, heads)]), "num_key_value_heads": max(heads)}
    except Exception as error:  # what the reader of a broken file raises is not documented
        raise ConfigError(f"{file} is not a GGUF file that can be read: {error}") from error
    full = _ITEM_BYTES["bfloat16"]
    tensors = {name: (tensor.shape, full * math.prod(tensor.shape)) for name, tensor in header.tensors.items()}
    size = _size(config, model, tensors, sum(each for _, each in tensors.values()))
    if model.unpacks:
        return size
    item = _ITEM_BYTES.get(model.dtype, full)
    sizes = {name: stored_bytes([tensor], item) for name, tensor in header.tensors.items()}
    return replace(size, weights_bytes=sum(sizes.values()), step_bytes=_step_bytes(sizes, config))


def _size(config: Mapping[str, Any], model: ModelConfig, tensors: _Tensors, stored: float) -> ModelSize:
    """Return the size of a model as it is loaded.

    tensors: {}: unknown.
    stored: bytes of all weights on disk.
    """
    quantized_before = "quantization_config" in config
    count = sum(math.prod(shape) for shape, _ in tensors.values())
    stored_item = stored / count if count else _ITEM_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    item = _ITEM_BYTES.get(model.dtype, stored_item)
    quantization = None if quantized_before else model.quantization
    if quantized_before:
        sizes = {name: size for name, (_, size) in tensors.items()}
    else:
        sizes = {name: _loaded_bytes(name, shape, item, quantization) for name, (shape, _) in tensors.items()}
    needed = sum(sizes.values())
    if not tensors:
        total = stored / stored_item
        needed = stored if quantized_before else total * item
        if quantization is not None:
            linear, ends = _estimated_numbers(total, config)
            needed -= linear * (item - _QUANTIZED_BYTES[quantization])
            needed -= ends * (item - _QUANTIZED_BYTES["int8"])
    kv_item = _ITEM_BYTES.get(model.kv_dtype) or (2 if quantized_before else min(math.ceil(item), 4))
    numbers = _kv_numbers(config, keeps_latents=model.tensor_parallel == 1)
    return ModelSize(
        weights_bytes=int(needed),
        kv_bytes=None if numbers is None else numbers * kv_item,
        positions=_positions(config),
        step_bytes=_step_bytes(sizes, config) if tensors else None,
    )


def _loaded_bytes(name: str, shape: Sequence[int], item: float, quantization: str | None) -> float:
    """Return the bytes of a tensor that was not quantised before. item: of a number that is not quantised now."""
    is_expert = bool(_EXPERTS.search(name))
    if quantization is not None and (len(shape) == 2 or is_expert):
        if is_expert or not _KEPT.search(name):
            item = _QUANTIZED_BYTES[quantization]
        elif _ENDS.search(name):
            item = _QUANTIZED_BYTES["int8"]
    return math.prod(shape) * item


def _step_bytes(sizes: Mapping[str, float], config: Mapping[str, Any]) -> int:
    """Return what a step with one token reads: not the rows of an embedding, and of experts those that it chooses."""
    is_tied = not any(map(_OUTPUT.search, sizes))
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") or 1
    chosen = _first(config, "num_experts_per_tok", "moe_k") or experts

    def share(name: str) -> float:
        if _LOOKED_UP.search(name) and not is_tied:
            return 0.0
        return chosen / experts if _EXPERTS.search(name) else 1.0

    return int(sum(size * share(name) for name, size in sizes.items()))


def _estimated_numbers(total: float, config: Mapping[str, Any]) -> tuple[float, float]:
    """Estimate how many weights linear layers have, and how many embeddings and the output layer.

    Both are 0 for models with experts, where the numbers are not known.
    """
    if any("experts" in key and value for key, value in config.items()):
        return 0, 0
    embedding = (_first(config, "vocab_size") or 0) * (_first(config, "hidden_size", "n_embd") or 0)
    ends = embedding * (1 if config.get("tie_word_embeddings") else 2)
    return max(total - ends, 0), ends


def _kv_numbers(config: Mapping[str, Any], *, keeps_latents: bool) -> int | None:
    """Return how many numbers the keys and values of a token are, in all layers."""
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    heads = _first(config, "num_attention_heads", "n_head")
    hidden = _first(config, "hidden_size", "n_embd")
    if layers is None or heads is None or hidden is None:
        return None
    layers *= _ATTENTIONS.get(str(config.get("model_type")), 1)
    if (latent := _first(config, "kv_lora_rank")) is not None:
        rotated, plain = _first(config, "qk_rope_head_dim") or 0, _first(config, "qk_nope_head_dim") or 0
        expanded = heads * (rotated + plain + (_first(config, "v_head_dim") or 0))
        return layers * (latent + rotated if keeps_latents else expanded)
    head_dim = _first(config, "head_dim") or hidden // heads
    return layers * (_first(config, "num_key_value_heads") or heads) * head_dim * 2


def _positions(config: Mapping[str, Any]) -> int | None:
    """Return up to how many tokens a text has the same positions, whatever its length."""
    positions = positions_of(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") if isinstance(rope, dict) else None
    if positions is None or kind not in _LENGTH_DEPENDENT:
        return positions
    original = rope.get("original_max_position_embeddings") or _first(config, "original_max_position_embeddings")
    return min(positions, int(original or positions))


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := config.get(name), int)), None)
