"""Writes GGUF files of tiny models as llama.cpp's converter does: its names, its orders of rows, its changed values.

What it does to each family is written here from its documentation, not from what reads the files.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

Named = Iterator[tuple[str, Tensor]]
Change = Callable[[str, Tensor, PretrainedConfig], Named]
_IN_LIST = re.compile(r"(.+\.(?:experts|altup_\w*projections))\.(\d+)(\.\w+)?\.weight")  # one tensor in the file
_KEYS = {  # by the configuration's names, as far as it has them
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "sliding_window": "attention.sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "conv_L_cache": "shortconv.l_cache",
}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    change: Change,
    keys: Mapping[str, Any],
    *,
    quantized: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write a file without a tokenizer.

    change: what the converter does to a tensor [Hub's name, values].
    keys: those of `_KEYS` that the model's configuration does not give, or gives differently. None: leave it out.
    add: adds more to the file.
    quantized: types of tensors, by the ends of their names in the file; the others are 32-bit floats.
    """
    config: Any = model.config
    layers = config.num_hidden_layers
    writer = gguf.GGUFWriter(path, architecture)
    stated = {key: getattr(config, name) for name, key in _KEYS.items() if hasattr(config, name)}
    stated |= {"block_count": layers, "feed_forward_length": getattr(config, "intermediate_size", None)}
    for key, value in (stated | _positions(config) | dict(keys)).items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    for name, values in _tensors(model, path.parent / "hub", change):
        known = names.get_name(name, (".weight", ".bias")) or name
        array = values.float().contiguous().numpy()
        kind = next((kind for end, kind in (quantized or {}).items() if known.endswith(end)), None)
        if kind is None:
            writer.add_tensor(known, array)
        else:
            writer.add_tensor(known, gguf.quantize(array, kind), raw_dtype=kind)
    if (rope := getattr(config, "rope_parameters", None) or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config, rope))
    for length in ("long", "short") if "long_factor" in rope else ():
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)


def _positions(config: Any) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    rope, local = parameters.get("full_attention", parameters), parameters.get("sliding_attention", {})
    keys = {"rope.freq_base": rope.get("rope_theta"), "rope.freq_base_swa": local.get("rope_theta")}
    if "partial_rotary_factor" in rope and rope["rope_type"] == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys |= {f"rope.scaling.yarn_{key}": rope.get(key) for key in ("beta_fast", "beta_slow")}
    return keys


def _llama3_factors(config: Any, rope: Mapping[str, Any]) -> Any:
    """Return what frequencies are divided by: 1 for short waves, the factor for long ones, and between them a line."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _tensors(model: PreTrainedModel, folder: Path, change: Change) -> Named:
    """Yield the tensors that the file has, by their names on the Hub: the experts of a layer are one tensor."""
    model.save_pretrained(folder)
    lists: dict[str, dict[int, Tensor]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if (member := _IN_LIST.fullmatch(name)) is None:
            yield from change(name, values, model.config)
        else:
            lists.setdefault(f"{member[1]}{member[3] or ''}.weight", {})[int(member[2])] = values
    for name, by_number in lists.items():
        yield from change(name, torch.stack([by_number[number] for number in range(len(by_number))]), model.config)


def plain(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Keep the values. Only names that the package's map does not have are changed."""
    if "experts.w" in name or "mixer.experts" in name:
        name = name.removeprefix("model.").replace("backbone.", "model.").replace("mixer", "mlp")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(".dt_bias", ".dt_proj.bias")
    yield name, values


def interleave(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Let the rows of queries and keys alternate between the halves of a head, as for Llama."""
    for end, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if f".{end}." in name:
            values = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    yield from plain(name, values, config)


def add_one(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Add 1 to the weights of norms, as for Gemma and Nemotron."""
    yield from plain(name, values + name.endswith("norm.weight"), config)


def mamba(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Write A for A_log, a convolution without its middle dimension, a norm in groups."""
    groups: Any = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", 1)
    if name.endswith("A_log"):
        values = -values.exp()
    if name.endswith(("A_log", ".D")):
        values = values[:, None]
    if name.endswith("conv1d.weight"):
        values = values.squeeze(1)
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        values = values.view(groups, -1)
    yield from interleave(name, values, config)


def granite(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Split gate and up, of experts and of the shared MLP."""
    if not name.endswith("input_linear.weight"):
        yield from mamba(name, values, config)
        return
    number = name.split(".")[2]
    shared = "_shexp" if "shared_mlp" in name else "_exps"
    for kind, half in zip(("gate", "up"), values.chunk(2, dim=-2), strict=True):
        yield f"blk.{number}.ffn_{kind}{shared}.weight", half


def falcon_h1(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Multiply weights by the multipliers of their layers."""
    c: Any = config
    sizes = [c.mamba_d_ssm] * 2 + [c.mamba_n_groups * c.mamba_d_state] * 2 + [c.mamba_n_heads]
    factors = {
        "down_proj": c.mlp_multipliers[1],
        "gate_proj": c.mlp_multipliers[0],
        "k_proj": c.key_multiplier * c.attention_in_multiplier,
        "q_proj": c.attention_in_multiplier,
        "v_proj": c.attention_in_multiplier,
        "o_proj": c.attention_out_multiplier,
        "mamba.out_proj": c.ssm_out_multiplier,
        "mamba.in_proj": c.ssm_in_multiplier
        * torch.cat([torch.full((size, 1), factor) for size, factor in zip(sizes, c.ssm_multipliers, strict=True)]),
        "lm_head": c.lm_head_multiplier,
        "embed_tokens": c.embedding_multiplier,
    }
    factor = next((factor for module, factor in factors.items() if name.endswith(f"{module}.weight")), 1.0)
    for changed, written in mamba(name, values, config):
        back = values if "_proj." in changed and "mamba" not in changed else written  # its heads are not interleaved
        yield changed, back * factor


def short_convolution(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    yield from plain(
        name.replace(".expert_bias", ".expert_bias.bias"), values.squeeze(1) if "conv.conv" in name else values, config
    )


def delta_rule(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Put all queries, keys, values and gates of Qwen3-Next together, and add 1 to its norms."""
    c: Any = config
    if name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + 1
    if "in_proj_qkvz" not in name:
        for changed, written in mamba(name, values, config):
            back = values if "self_attn" in changed else written  # its heads are not interleaved
            yield changed, back.squeeze(-1) if name.endswith("A_log") else back
        return
    heads, ratio = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
    sizes = [c.linear_key_head_dim] * 2 + [ratio * c.linear_value_head_dim] * 2
    *qkv, z = [part.reshape(-1, c.hidden_size) for part in values.view(heads, -1, c.hidden_size).split(sizes, dim=1)]
    block = f"blk.{name.split('.')[2]}"
    yield f"{block}.attn_qkv.weight", torch.cat(qkv)
    yield f"{block}.attn_gate.weight", z


def tile_values(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Put the first value head of every key head first, then the second, as for Qwen3.5."""
    c: Any = config
    heads, ratio = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
    rows = 2 * heads * c.linear_key_head_dim

    def tile(part: Tensor) -> Tensor:
        return part.view(heads, ratio, -1, *part.shape[1:]).transpose(0, 1).reshape(part.shape)

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        values = torch.cat([values[:rows], tile(values[rows:])])
    elif name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        values = tile(values)
    elif name.endswith("linear_attn.out_proj.weight"):
        values = tile(values.T.contiguous()).T
    yield from delta_rule(name, values, config)


def latent(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Split the second projection of keys and values, that of keys transposed, as for DeepSeek."""
    c: Any = config
    if "kv_b_proj" not in name:
        yield from plain(name, values, config)
        return
    keys, written = values.view(c.num_attention_heads, -1, c.kv_lora_rank).split([c.qk_nope_head_dim, c.v_head_dim], 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), written


def gpt_oss(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Transpose experts, and take gate and up apart, which alternate."""
    if "experts" not in name:
        yield (f"{name}.weight" if name.endswith("sinks") else name), values
        return
    layer, _, rest = name.partition(".mlp.experts.")
    kind = "bias" if rest.endswith("_bias") else "weight"
    values = values if kind == "bias" else values.transpose(1, 2)
    if rest.startswith("down"):
        yield f"{layer}.mlp.experts.down_proj.{kind}", values
        return
    along = -1 if kind == "bias" else -2
    for index, half in enumerate(("gate", "up")):
        chosen = torch.arange(index, values.shape[along], 2)
        yield f"{layer}.mlp.experts.{half}_proj.{kind}", values.index_select(along, chosen)


def transposed(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Transpose GPT-2's matrices."""
    is_matrix = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    yield name, values.T if is_matrix else values


def per_layer_inputs(name: str, values: Tensor, config: PretrainedConfig) -> Named:
    """Give Gemma's single numbers the names of weights."""
    yield (f"{name}.weight" if name.endswith(("_scale", "layer_scalar")) else name), values
