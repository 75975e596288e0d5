"""Tiny configurations of all families that transformers has a causal decoder for, and models with random weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3nConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

VOCAB = 64
# Each configuration takes the settings that it knows. Weights are rounded in groups of 32.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_UNTIED = {"tie_word_embeddings": False}  # tied, they would repeat a token for ever
_FULL = {"num_key_value_heads": 4}
_DELTA_RULE = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_SHARED_KEYS = {"num_kv_shared_layers": 2}
_GEMMA_3N = _WINDOWS | _PER_LAYER | _SHARED_KEYS | {"laurel_rank": 4}
_GEMMA_4 = _WINDOWS | _PER_LAYER | _SHARED_KEYS | {"global_head_dim": 32}
_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
_LLAMA_4 = {"intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 64}
_DEEP_VISION = _QWEN_VISION | {"deepstack_visual_indexes": [0]}
_LLAMA_4_VISION = _VISION | {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
_PIXTRAL = _VISION | {"model_type": "pixtral", "head_dim": 8}


def _axes(*sections: int, **more: object) -> dict[str, Any]:
    """Return rotary positions on three axes, whose sections add up to half a head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}}


def _multimodal(text: dict[str, Any], vision: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return the parts of a multimodal configuration."""
    return {"text_config": text, **({} if vision is None else {"vision_config": vision}), **more}


# What differs from SHAPE, by family; None removes a setting.
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": _FULL,
    "axk2": _FULL,
    "bailing_hybrid": _FULL | _DELTA_RULE,
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "hidden_size": None,
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "deepseek_v2": _FULL,
    "deepseek_v3": _FULL,
    "deepseek_v32": _FULL,
    "dots3_note": _multimodal(_FULL, {"adapter_out_dim": 64}, audio_config={"adapter_out_dim": 64}),
    "dots3_note_text": _FULL,
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": _GEMMA_3N,
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": _WINDOWS | {"global_head_dim": 32},
    "glm4_moe_lite": _FULL,
    "glm_moe_dsa": _FULL,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0},
    "jamba": {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _FULL | _DELTA_RULE | {"num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS | {"num_dense_layers": 1},
    "llama4_text": _LLAMA_4,
    "longcat_flash": _FULL
    | {"num_layers": 2, "ffn_hidden_size": 48, "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 8},
    "minicpm3": _FULL | _UNTIED,
    "ministral3": {"rope_parameters": _YARN},
    "nemotron_h": {
        "num_hidden_layers": None,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "expand": 2,
    },
    "got_ocr2": _multimodal({"model_type": "qwen2"}, _VISION | {"output_channels": 32, "global_attn_indexes": [1]}),
    "olmo_hybrid": _DELTA_RULE,
    "gemma2": _UNTIED,
    "gemma3_text": _UNTIED,
    "moshi": {"sliding_window": None},  # in transformers, caches alone know of it
    "phimoe": {"sliding_window": None},
    "doge": {"sliding_window": None},
    "prophetnet": {"num_hidden_layers": None},
    "xlnet": {"max_position_embeddings": None, "d_head": 16},
    "fuyu": _multimodal({"model_type": "persimmon"}),
    "moss_transcribe_diarize": _multimodal(
        {"model_type": "qwen3"}, audio_config={"hidden_size": 32, "num_hidden_layers": 1}
    ),
    "phi4_multimodal": {"vision_config": _VISION, "audio_config": {"hidden_size": 32, "num_blocks": 1}},
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_5_moe_text": _DELTA_RULE,
    "qwen3_next": _DELTA_RULE,
    "qwen4_exp_text": _DELTA_RULE,
    "xlstm": {"v_head_dim": None},
    "youtu": _FULL | {"pad_token_id": None},  # transformers clears the row of this token after it was loaded
    "zamba": {"mamba_d_state": 8, "n_mamba_heads": 2, "layers_block_type": ["mamba", "hybrid"] * 2} | _UNTIED,
    "zamba2": {
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    # multimodal checkpoints
    "gemma3": _multimodal(_WINDOWS, _VISION, **_UNTIED),
    "gemma3n": _multimodal(_GEMMA_3N),
    "gemma4": _multimodal(_GEMMA_4, _VISION),
    "gemma4_assistant": _multimodal(_ASSISTANT | {"model_type": "gemma4_text"}),
    "gemma4_unified": _multimodal(_WINDOWS | {"global_head_dim": 32}, _VISION),
    "gemma4_unified_assistant": _multimodal(_ASSISTANT | {"model_type": "gemma4_unified_text"}),
    "glm4v_moe": _multimodal(_axes(2, 2, 4, partial_rotary_factor=1.0), _QWEN_VISION),
    "llama4": _multimodal(_LLAMA_4, _LLAMA_4_VISION),
    "llava": _multimodal({"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
    "mistral3": _multimodal({"model_type": "mistral"}, _PIXTRAL),
    "mistral3 (ministral3)": _multimodal({"model_type": "ministral3", "rope_parameters": _YARN}, _PIXTRAL),
    "qwen2_5_vl": _multimodal(_axes(2, 2, 4), _QWEN_VISION),
    "qwen3_5": _multimodal(_DELTA_RULE, _QWEN_VISION),
    "qwen3_5_moe": _multimodal(_DELTA_RULE, _QWEN_VISION),
    "qwen3_vl": _multimodal(_axes(4, 2, 2, mrope_interleaved=True), _DEEP_VISION),
    "qwen3_vl_moe": _multimodal(_axes(4, 2, 2, mrope_interleaved=True), _DEEP_VISION),
    "qwen4_exp": _multimodal(_DELTA_RULE, _QWEN_VISION),
    "smolvlm": _multimodal({"model_type": "llama"}, _VISION),
}
FAMILIES = sorted(
    name for name in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OVERRIDES} if name.split()[0] in CONFIG_MAPPING
)


def make_config(family: str) -> PretrainedConfig:
    """Return a tiny configuration; the whole checkpoint's if that is multimodal."""
    kind = CONFIG_MAPPING[family.split()[0]]
    settings = dict(OVERRIDES.get(family, {}))
    if "text_config" in settings:
        text_kind = kind.sub_configs["text_config"]
        settings["text_config"] = _settings(text_kind, settings["text_config"])
    else:
        settings = _settings(kind, settings)
    config: PretrainedConfig = kind(**settings)
    return config


def _settings(kind: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    if "model_type" in overrides:
        kind = CONFIG_MAPPING[overrides["model_type"]]
    known = {name for each in kind.__mro__ for name in getattr(each, "__annotations__", ())} | {*kind.attribute_map}
    shape = {name: value for name, value in SHAPE.items() if name in known}
    return {name: value for name, value in (shape | overrides).items() if value is not None}


def make_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a model in float32, with slow decays so that the beginning of a text matters for long."""
    torch.manual_seed(seed)
    if isinstance(config, Gemma3nConfig):  # its vision tower needs a package
        config = config.get_text_config()
    multimodal = config.get_text_config() is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto: Any = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 0)
            elif parameter.dim() > 1 or name.endswith(("sinks", "router.bias")):
                parameter.normal_(std=0.6 if "x_proj" in name else 0.15)
            elif name.endswith(("dt_bias", "dt_proj.bias", ".D")):
                parameter.normal_(std=0.5)
    return model.float().eval()


def save_model(family: str, model: PreTrainedModel, folder: Path) -> None:
    """Save a checkpoint in the form that the Hub has."""
    model.save_pretrained(folder)  # it writes the names of weights that the Hub has
    if family == "gemma3n":
        file = folder / "model.safetensors"
        weights = {key.replace("model.", "model.language_model.", 1): part for key, part in load_file(file).items()}
        weights["model.vision_tower.stem.weight"] = torch.ones(4, 4)
        save_file(weights, file, {"format": "pt"})
        make_config(family).save_pretrained(folder)
