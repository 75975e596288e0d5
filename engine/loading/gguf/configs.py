"""Settings of a configuration that take more than other names for a GGUF file's keys."""

import math
from typing import Any

from decoding.errors import ConfigError
from engine.loading.gguf.header import Header

Config = dict[str, Any]  # of a PretrainedConfig, by its names
_SIGMOID, _SOFTMAX = 2, 1  # values of expert_gating_func


def _expect(header: Header, key: str, value: Any) -> None:
    """Raise ConfigError if a key has another value than the one that transformers' code computes."""
    if (actual := header.take(key, value)) != value:
        raise ConfigError(f"{header.architecture}.{key} is {actual}; only {value} is supported")


def _sliding(config: Config, header: Header, *, every: int | None = None) -> None:
    """Set which layers have windows. every: how many layers apart the full ones are; None: as the file says."""
    layers, period = config["num_hidden_layers"], header.take("attention.sliding_window_pattern", every)
    if not config.get("sliding_window"):
        config.pop("sliding_window", None)
        windows = [False] * layers
    elif isinstance(period, list):
        windows = [bool(has_window) for has_window in period[:layers]]
    else:
        windows = [period is not None and (layer + 1) % period != 0 for layer in range(layers)]
    config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]


def llama(config: Config, header: Header) -> None:
    """Set experts, which make it a Mixtral."""
    if count := header.take("expert_count"):
        config |= {
            "model_type": "mixtral",
            "num_local_experts": count,
            "num_experts_per_tok": header.take("expert_used_count"),
        }
        _expect(header, "expert_gating_func", _SOFTMAX)


def mistral3(config: Config, header: Header) -> None:
    """Set how attention grows with positions; models before Ministral 3 lack it."""
    if (beta := header.take("attention.temperature_scale")) is None:
        config["model_type"] = "mistral"
    else:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1.0, "llama_4_scaling_beta": beta}


def qwen_experts(config: Config, header: Header) -> None:
    """Set which layers have experts."""
    layers = config["num_hidden_layers"]
    config["mlp_only_layers"] = [
        layer for layer, routed in enumerate(header.layers_with("ffn_gate_inp.weight", layers)) if not routed
    ]
    config["norm_topk_prob"] = config["model_type"] != "qwen2_moe"
    _expect(header, "expert_gating_func", _SOFTMAX)


def qwen_next(config: Config, header: Header) -> None:
    """Set which layers carry a state, and the size of their value heads."""
    config["layer_types"] = [
        "linear_attention" if recurrent else "full_attention"
        for recurrent in header.layers_with("ssm_a", config["num_hidden_layers"])
    ]
    header.take("full_attention_interval")
    header.take("attention.recurrent_layers")
    config["linear_value_head_dim"] = header.take("ssm.inner_size") // config["linear_num_value_heads"]
    if "num_experts" in config:
        qwen_experts(config, header)


def gemma(config: Config, header: Header) -> None:
    """Set windows, and the scale of attention. As in llama.cpp, the number of layers tells models of 27 B."""
    _sliding(config, header, every=2 if config["model_type"] == "gemma2" else 6)
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if largest else config["head_dim"]


def gemma3n(config: Config, header: Header) -> None:
    """Set windows, the sizes that only tensors show, and how sparse activations are."""
    _sliding(config, header, every=5)
    config["vocab_size_per_layer_input"] = header.shape("per_layer_token_embd.weight")[0]
    config["laurel_rank"] = header.shape("blk.0.laurel_l.weight")[0]
    scales = header.take_per_layer("activation_sparsity_scale", config["num_hidden_layers"], -math.inf)
    # The file has the threshold in deviations above the mean; the model has the share of numbers below it.
    config["activation_sparsity_pattern"] = [round(0.5 + 0.5 * math.erf(each / math.sqrt(2)), 6) for each in scales]


def gemma4(config: Config, header: Header) -> None:
    """Set windows, and what differs between layers with and without one."""
    _sliding(config, header, every=6)
    layers, sliding = config["num_hidden_layers"], [kind == "sliding_attention" for kind in config["layer_types"]]
    config["global_head_dim"] = config["head_dim"]
    config["head_dim"] = header.take("attention.key_length_swa", config["head_dim"])
    header.take("attention.value_length_swa")
    header.take_below("rope.dimension_count")
    heads = config["num_key_value_heads"]
    if isinstance(heads, list):
        config["num_key_value_heads"] = next(
            (n for n, windowed in zip(heads, sliding, strict=True) if windowed), heads[0]
        )
        config["num_global_key_value_heads"] = next(
            (n for n, windowed in zip(heads, sliding, strict=True) if not windowed), heads[-1]
        )
    own = layers - config.get("num_kv_shared_layers", 0)  # layers with keys and values of their own
    with_values = header.layers_with("attn_v.weight", own)
    config["attention_k_eq_v"] = not all(with_values)
    widths = config["intermediate_size"]
    if isinstance(widths, list):
        config["intermediate_size"], config["use_double_wide_mlp"] = widths[0], widths[-1] != widths[0]
    config["enable_moe_block"] = bool(config.get("num_experts"))
    if config.get("hidden_size_per_layer_input"):
        config["vocab_size_per_layer_input"] = header.shape("per_layer_token_embd.weight")[0]


def lfm2(config: Config, header: Header) -> None:
    """Set which layers have attention."""
    heads = config["num_key_value_heads"]
    config["layer_types"] = ["full_attention" if count else "conv" for count in heads]
    config["num_key_value_heads"] = max(heads)
    config["block_auto_adjust_ff_dim"] = False
    _expect(header, "expert_gating_func", _SIGMOID)


def _ssm(config: Config, header: Header) -> tuple[int, int]:
    """Return how many heads Mamba 2 has, and their size."""
    heads = header.take("ssm.time_step_rank")
    return heads, header.take("ssm.inner_size") // heads


def granite_hybrid(config: Config, header: Header) -> None:
    """Set which layers have attention; with rotary positions it is a Bamba."""
    heads = header.layers_with("attn_k.weight", config["num_hidden_layers"])
    config["num_key_value_heads"] = max(config["num_key_value_heads"])
    config["mamba_n_heads"], config["mamba_d_head"] = _ssm(config, header)
    config["mamba_expand"] = config["mamba_n_heads"] * config["mamba_d_head"] // config["hidden_size"]
    if header.take("rope.scaling.finetuned", True):
        config["model_type"] = "bamba"
        config["attn_layer_indices"] = [layer for layer, has_attention in enumerate(heads) if has_attention]
        return
    config["layer_types"] = ["attention" if has_attention else "mamba" for has_attention in heads]
    config.setdefault("num_local_experts", 0)
    dense = "blk.0.ffn_up.weight"
    if dense in header.tensors:
        config["shared_intermediate_size"] = header.shape(dense)[0]


def granite(config: Config, header: Header) -> None:
    """Set shared experts. Raises ConfigError if attention has no positions."""
    if not header.take("rope.scaling.finetuned", True):
        raise ConfigError("its attention has no positions; only hybrid models without them are supported")
    if "shared_intermediate_size" in config and config["model_type"] == "granitemoe":
        config["model_type"] = "granitemoeshared"


def nemotron_h(config: Config, header: Header) -> None:
    """Set what each layer is: a state, attention, an MLP or experts."""
    layers = config["num_hidden_layers"]
    kinds = {"mlp": "ffn_up.weight", "moe": "ffn_gate_inp.weight", "full_attention": "attn_k.weight"}
    named = {kind: header.layers_with(tensor, layers) for kind, tensor in kinds.items()}
    config["layers_block_type"] = [
        next((kind for kind, has in named.items() if has[layer]), "linear_attention") for layer in range(layers)
    ]
    config["num_key_value_heads"] = max(config["num_key_value_heads"])
    widths = [header.shape(f"blk.{layer}.ffn_up.weight")[0] for layer, is_mlp in enumerate(named["mlp"]) if is_mlp]
    config["intermediate_size"] = max(widths, default=0)
    config["mamba_num_heads"], config["mamba_head_dim"] = _ssm(config, header)


def falcon_h1(config: Config, header: Header) -> None:
    """Set the sizes of Mamba 2. Multipliers are in the weights."""
    config["mamba_n_heads"], config["mamba_d_head"] = _ssm(config, header)
    config["mamba_d_ssm"] = config["mamba_n_heads"] * config["mamba_d_head"]
    config["mamba_norm_before_gate"] = False
    config["mamba_rms_norm"] = header.has("ssm_norm.weight")


def mamba2(config: Config, header: Header) -> None:
    """Set the sizes of Mamba 2."""
    config["num_heads"], config["head_dim"] = _ssm(config, header)
    config["expand"] = config["num_heads"] * config["head_dim"] // config["hidden_size"]
    config["use_bias"] = header.has("ssm_in.bias")


def _dense_first(config: Config, header: Header) -> None:
    """Set how many layers at the beginning have no experts."""
    routed = header.layers_with("ffn_gate_inp.weight", config["num_hidden_layers"])
    config["first_k_dense_replace"] = routed.index(True) if True in routed else len(routed)
    header.take("leading_dense_block_count")


def deepseek(config: Config, header: Header) -> None:
    """Set the sizes of latent attention, and the version by how experts are chosen."""
    _dense_first(config, header)
    function = header.take("expert_gating_func") or (_SIGMOID if header.has("exp_probs_b.bias") else _SOFTMAX)
    if function == _SOFTMAX:
        config["model_type"] = "deepseek_v2"
        config["topk_method"] = "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"
        config.setdefault("norm_topk_prob", False)
    config.setdefault("n_group", 1)
    config.setdefault("topk_group", 1)
    config.setdefault("q_lora_rank", None)
    config["num_key_value_heads"] = config["num_attention_heads"]
    keys, values = config.pop("head_dim", None), header.take("attention.value_length")
    config["qk_rope_head_dim"] = config["head_dim"] = header.take("rope.dimension_count")
    config["qk_nope_head_dim"] = header.take("attention.key_length_mla", keys) - config["qk_rope_head_dim"]
    config["v_head_dim"] = header.take("attention.value_length_mla", values)


def glm4_moe(config: Config, header: Header) -> None:
    """Set which layers have experts."""
    _dense_first(config, header)
    _expect(header, "expert_gating_func", _SIGMOID)


def gpt_oss(config: Config, header: Header) -> None:
    """Set windows: every other layer has one."""
    _sliding(config, header, every=2)
    _expect(header, "expert_gating_func", _SOFTMAX)
    header.take("expert_feed_forward_length")


def minimax(config: Config, header: Header) -> None:
    """Set the bias that corrects the choice of experts."""
    config["use_routing_bias"] = True
    _expect(header, "expert_gating_func", _SIGMOID)


def phi3(config: Config, header: Header) -> None:
    """Leave out a window of 0."""
    if not config.get("sliding_window"):
        config.pop("sliding_window", None)


def every_fourth_full(config: Config, header: Header) -> None:
    """Set windows: every fourth layer has none, unless the file says otherwise."""
    _sliding(config, header, every=4)


def olmo2(config: Config, header: Header) -> None:
    """Set windows, which make it an OLMo 3."""
    if config.get("sliding_window"):
        config["model_type"] = "olmo3"
        _sliding(config, header, every=4)


def olmoe(config: Config, header: Header) -> None:
    """Don't normalise the weights of experts."""
    config["norm_topk_prob"] = False
    _expect(header, "expert_gating_func", _SOFTMAX)


def stablelm(config: Config, header: Header) -> None:
    """Set whether attention and MLP run in parallel."""
    header.take("use_parallel_residual")
    config["use_parallel_residual"] = not header.has("ffn_norm.weight")
