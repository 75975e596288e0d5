"""The configuration of a GGUF file's model, where the file has each of its weights, and their values."""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import QuantizedWeight
from engine.loading.gguf.blocks import BLOCKS, quantized_blocks
from engine.loading.gguf.configs import Config
from engine.loading.gguf.families import FAMILIES, Family
from engine.loading.gguf.header import Header
from engine.loading.gguf.rope import set_positions
from engine.loading.gguf.sources import WEIGHTS, Source, rotated_rows
from engine.loading.quantizer import can_be_quantized, complete_experts, expert_shapes
from engine.loading.text_model import causal_class

_KEYS = {  # of all families, as far as a file has them
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}
_WITHOUT_EFFECT = {  # on the text
    "vocab_size",  # the embeddings have it, too
    "attention.value_length",  # shapes would show another one than the keys'
    "attention.layer_norm_epsilon",  # of models with the other kind of norms
    "attention.layer_norm_rms_epsilon",
    "tensor_data_layout",
    "pooling_type",
    "n_deepstack_layers",
    "use_parallel_residual",
}
_OF_IMAGES = ("mm.", "vision.")
_NEUTRAL = {"expert_weights_scale": 1.0, "logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0}
_SWITCHES = {  # of configurations, by what a tensor's name ends with if they are on
    "attention_bias": "attn_q.bias",
    "attention_out_bias": "attn_output.bias",
    "mlp_bias": "ffn_up.bias",
    "use_qkv_bias": "attn_q.bias",
    "use_qk_norm": "attn_q_norm.weight",
    "qk_layernorm": "attn_q_norm.weight",
    "use_conv_bias": "ssm_conv1d.bias",
    "mamba_conv_bias": "ssm_conv1d.bias",
    "mamba_proj_bias": "ssm_in.bias",
    "conv_bias": "shortconv.conv.bias",
    "use_expert_bias": "exp_probs_b.bias",
}
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # parts of the configuration
_IN_LAYER = re.compile(r"(?:model|backbone|transformer)\.(?:layers|h)\.(\d+)\.(.+)")
_IN_LIST = re.compile(r"(.+)\.(\d+)")  # a module of a list
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """A weight of the model and the tensors of the file that hold it."""

    weight: str
    shape: torch.Size
    tensors: tuple[str, ...]
    source: Source
    index: int | None  # of the module in its list, where the tensors hold all of them
    rows: Tensor | None  # which of the tensors' rows stands in each row of the weight
    columns: Tensor | None
    shift: float  # that the file added


def make_config(header: Header) -> PretrainedConfig:
    """Return the configuration of a file's model.

    Raises ConfigError if its architecture is unknown, or a key that may change texts is.
    """
    family = FAMILIES.get(header.architecture)
    if family is None:
        raise _unreadable(f"architecture {header.architecture!r} is not supported")
    config: Config = {"model_type": family.model_type}
    for key, name in (_KEYS | dict(family.keys)).items():
        if (value := header.take(key)) is not None:
            config[name] = value
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    config[layers] -= header.take("nextn_predict_layers", 0)
    config["vocab_size"] = header.shape("token_embd.weight")[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    for token, name in _SPECIAL.items():
        config[name] = header.fields.get(f"tokenizer.ggml.{token}_token_id")
    if not header.take("attention.causal", True):
        raise ConfigError("its tokens see those that come after them; only decoders can be served")
    if family.adjust is not None:
        family.adjust(config, header)
    made = _new_config(config, header)
    set_positions(made, header)
    for key in _WITHOUT_EFFECT:
        header.take(key)
    for prefix in _OF_IMAGES:
        header.take_below(prefix)
    if unknown := {key: value for key, value in header.remaining().items() if value != _NEUTRAL.get(key)}:
        named = ", ".join(f"{header.architecture}.{key} = {str(value)[:40]}" for key, value in unknown.items())
        raise _unreadable(f"unknown keys may change its texts: {named}")
    return made


def _new_config(config: Config, header: Header) -> PretrainedConfig:
    kind: Any = CONFIG_MAPPING[config.pop("model_type")]
    known = vars(kind())
    if "head_dim" in known and config.get("num_attention_heads"):
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    switches = {name: header.has(f".{tensor}") for name, tensor in _SWITCHES.items() if name in known}
    made: PretrainedConfig = kind(**(switches | config))
    return made


def place_weights(header: Header, config: PretrainedConfig) -> tuple[PreTrainedModel, list[Placement]]:
    """Return the model on the meta device, and where each of its weights is in the file.

    Raises ConfigError if tensors are missing, unknown, or of other shapes.
    """
    with torch.device("meta"):
        model = causal_class(config)(config)
    stored = model.state_dict(keep_vars=True)
    own = {
        **dict(model.named_parameters()),
        **{name: stored[name] for name, _ in model.named_buffers() if name in stored},
    }
    family, missing = FAMILIES[header.architecture], []
    placements = []
    for name, weight in own.items():
        placement = _placement(name, weight.shape, family, header, config)
        if placement is None:
            missing.append(name)
        else:
            placements.append(placement)
    if missing:
        raise _unreadable(f"it lacks {len(missing)} weights: {_shown(missing)}")
    used = {tensor for placement in placements for tensor in placement.tensors}
    if unknown := [name for name in header.tensors if name not in used and not _is_unread(name, config)]:
        raise _unreadable(f"it has {len(unknown)} unknown tensors: {_shown(unknown)}")
    for placement in placements:
        _check_shape(placement, header, config)
    return model, placements


def _is_unread(tensor: str, config: PretrainedConfig) -> bool:
    """Whether a tensor is left out: it is in the configuration, or in layers that predict more than one token."""
    layer = re.match(r"blk\.(\d+)\.", tensor)
    return tensor in _UNREAD or (layer is not None and int(layer[1]) >= config.num_hidden_layers)


def _placement(
    name: str, shape: torch.Size, family: Family, header: Header, config: PretrainedConfig
) -> Placement | None:
    """Return where a weight is; None if it is not in the file."""
    in_layer = _IN_LAYER.fullmatch(name)
    prefix, local = ("", name) if in_layer is None else (f"blk.{in_layer[1]}.", in_layer[2])
    module, _, kind = local.rpartition(".")
    if kind not in ("weight", "bias") or local in family.weights or local in WEIGHTS:
        module, kind = local, ""
    entry, index = family.weights.get(module, WEIGHTS.get(module)), None
    if entry is None and (in_list := _IN_LIST.fullmatch(module)) is not None:
        entry, index = family.weights.get(in_list[1], WEIGHTS.get(in_list[1])), int(in_list[2])
    if entry is None:
        return None
    source = Source((entry,)) if isinstance(entry, str) else entry
    for tensors in (source.tensors, source.fallback):
        named = tuple(_full_name(f"{prefix}{tensor}", kind, header) for tensor in tensors)
        if named and all(tensor in header.tensors for tensor in named):
            break
    else:
        return None
    return Placement(
        weight=name,
        shape=shape,
        tensors=named,
        source=source,
        index=index if source.index else None,
        rows=_rows(source, named[0], family, header, config),
        columns=None if source.columns is None else source.columns(config),
        shift=1.0 if name.endswith(family.shifted) else 0.0,
    )


def _full_name(tensor: str, kind: str, header: Header) -> str:
    """Return a tensor's name. kind: "weight", "bias", or "" for names that are complete; some lack it in files, too."""
    return f"{tensor}.{kind}" if kind and tensor not in header.tensors else tensor


def _rows(source: Source, tensor: str, family: Family, header: Header, config: PretrainedConfig) -> Tensor | None:
    if family.permuted and (heads := re.search(r"\.attn_([qk])\.", tensor)):
        count = config.num_attention_heads if heads[1] == "q" else config.num_key_value_heads
        return rotated_rows(count, header.shape(tensor)[0])
    return None if source.rows is None else source.rows(config)


def _check_shape(placement: Placement, header: Header, config: PretrainedConfig) -> None:
    """Raise ConfigError if the tensors do not make the weight's shape."""
    shapes = [header.shape(tensor) for tensor in placement.tensors]
    try:
        assemble(placement, [torch.empty(shape, device="meta") for shape in shapes], config)
    except (IndexError, RuntimeError) as error:
        raise _unreadable(
            f"{' and '.join(placement.tensors)} are {' and '.join(map(str, shapes))}, which does not make "
            f"{placement.weight} {tuple(placement.shape)}"
        ) from error


def assemble(placement: Placement, tensors: Sequence[Tensor], config: PretrainedConfig) -> Tensor:
    """Return a weight, given the values of its tensors. Raises RuntimeError if their shapes do not fit."""
    source = placement.source
    if placement.index is not None:
        tensors = [tensor[placement.index] for tensor in tensors]
    along = -1 if placement.weight.endswith("bias") or tensors[0].dim() < 2 else -2
    if source.compute is not None:
        weight = source.compute(tensors, config)
    else:
        weight = tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim=along)
    for order, dimension in ((placement.rows, along), (placement.columns, -1)):
        if order is not None:
            if len(order) != weight.shape[dimension]:
                raise RuntimeError(f"{len(order)} rows of {weight.shape[dimension]}")
            weight = weight.index_select(dimension, order.to(weight.device))
    weight = weight.transpose(-1, -2) if source.transposed and weight.dim() > 1 and along == -2 else weight
    if placement.shift:
        weight = weight - placement.shift
    one_more = [size for size in weight.shape if size != 1] == [size for size in placement.shape if size != 1]
    if not (one_more or len(placement.shape) == 1):
        raise RuntimeError(f"{tuple(weight.shape)}")
    return weight.reshape(placement.shape).contiguous()


def read_weights(
    header: Header, placements: Sequence[Placement], config: PretrainedConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights by name, unpacked."""
    for placement in placements:
        tensors = [torch.from_numpy(header.tensors[name].values()) for name in placement.tensors]
        yield placement.weight, assemble(placement, tensors, config).to(dtype)


def stored_weights(
    header: Header, placements: Sequence[Placement], model: PreTrainedModel
) -> dict[str, QuantizedWeight]:
    """Return the weights of linear layers, embeddings and experts that stay quantised as in the file, by name."""
    weights: dict[str, QuantizedWeight] = {}
    experts = dict(expert_shapes(model))
    for placement in placements:
        if not _stays_as_it_is(placement, header, model, experts):
            continue
        tensors = (header.tensors[tensor] for tensor in placement.tensors)
        parts = [quantized_blocks(tensor.kind.name, np.array(tensor.data)) for tensor in tensors]
        if all(part.can_join(parts[0]) for part in parts):
            weight = QuantizedWeight.joined(parts)
            weights[placement.weight] = weight if placement.rows is None else weight.rows(placement.rows)
    return complete_experts(model, weights)


def _stays_as_it_is(placement: Placement, header: Header, model: PreTrainedModel, experts: Container[str]) -> bool:
    """Whether a weight can be quantised, and is in the file, with all of its numbers, moved by rows at most."""
    source, layer = placement.source, model.get_submodule(placement.weight.rpartition(".")[0])
    if placement.weight in experts:
        is_fit = source.transposed == layer.is_transposed
    else:
        is_fit = can_be_quantized(layer) and source.transposed == isinstance(layer, Conv1D)
    is_moved = source.compute or placement.shift or placement.index is not None or placement.columns is not None
    return is_fit and not is_moved and all(header.tensors[name].kind.name in BLOCKS for name in placement.tensors)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _unreadable(problem: str) -> ConfigError:
    return ConfigError(f"{problem}; use a safetensors checkpoint of the model")
