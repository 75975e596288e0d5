"""Tiny models with random weights whose layers carry a state, one per family."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA_RULE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_NO_ATTENTION = {
    **{name: value for name, value in SHAPE.items() if name in ("vocab_size", "hidden_size") or "token" in name},
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": SHAPE | DELTA_RULE | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": SHAPE | DELTA_RULE,
    "olmo_hybrid": SHAPE | DELTA_RULE,
    "lfm2": SHAPE | _CONVOLUTIONS | {"block_ff_dim": 48},
    "lfm2_moe": SHAPE | _CONVOLUTIONS | _EXPERTS | {"num_dense_layers": 1},
    "granitemoehybrid": SHAPE
    | _MAMBA
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48, "num_local_experts": 0},
    "bamba": SHAPE | _MAMBA | {"attn_layer_indices": [1, 3]},
    "falcon_h1": SHAPE | _MAMBA | {"mamba_d_ssm": 64},
    "nemotron_h": SHAPE
    | {
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "expand": 2,
    },
    "zamba2": SHAPE
    | {
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_expand": 2,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
    },
    "mamba": _NO_ATTENTION | {"state_size": 8},
    "falcon_mamba": _NO_ATTENTION | {"state_size": 8},
    "jamba": SHAPE | _EXPERTS | {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": SHAPE
    | {
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "tie_word_embeddings": False,
    },
    "kimi_linear": SHAPE
    | _EXPERTS
    | {"num_key_value_heads": 4, "num_experts_per_token": 2, "n_group": 1, "topk_group": 1}
    | {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    | {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": DELTA_RULE["layer_types"]},
    "mamba2": _NO_ATTENTION
    | {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 8,
    },
}


def tiny_hybrid(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a model of a family, in float32. Its decays are such that a text's beginning counts for long."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**CONFIGS[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 0)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.6 if "x_proj" in name else 0.15)
            elif name.endswith(("dt_bias", "dt_proj.bias", ".D")):
                parameter.normal_(std=0.5)
    return model.float().eval()
