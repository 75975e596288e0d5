"""The architectures of GGUF files that can be read: their keys and tensors, by transformers' settings and weights.

The names are those of llama.cpp's converter (`gguf.constants`). A weight is found by its own name in `WEIGHTS` or its
family's; families differ only in what stands in their entries here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.loading.gguf import configs
from engine.loading.gguf.configs import Config
from engine.loading.gguf.header import Header
from engine.loading.gguf.sources import (
    AFTER_ATTENTION,
    DELTA_RULE,
    EXPERTS,
    GATE_UP,
    GATED,
    GRANITE_EXPERTS,
    PER_LAYER_INPUT,
    QKV,
    SANDWICH,
    SHARED,
    SHORT_CONVOLUTION,
    TILED_DELTA_RULE,
    Source,
    alternating_rows,
    modules,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How files of an architecture are read."""

    model_type: str  # of the configuration; `adjust` may choose another one
    keys: Mapping[str, str] = field(default_factory=dict)  # the configuration's names, by those in the file
    weights: Mapping[str, str | Source] = field(default_factory=dict)  # these take precedence over `WEIGHTS`
    permuted: bool = False  # rows of queries and keys alternate between the halves that rotate together
    shifted: tuple[str, ...] = ()  # endings of the norms' weights that are stored with 1 added
    adjust: Callable[[Config, Header], None] | None = None  # changes what renaming can't


_ROUTED = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL = {**_ROUTED, "expert_count": "num_local_experts"}
_GROUPED = {  # experts as in DeepSeek
    **_ROUTED,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_QWEN_EXPERTS = {
    **_ROUTED,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_LAYER_NORM = "attention.layer_norm_epsilon"
_RMS_NORM = "attention.layer_norm_rms_epsilon"


_EPSILON_OF_LAYER_NORM = {_LAYER_NORM: "layer_norm_eps"}
_DELTA_RULE = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_DELTA_NORMS = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")  # not in linear_attn
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    **_LOCAL,
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}
_MAMBA2_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
}
_NEMOTRON_H: Family = Family(
    model_type="nemotron_h",
    permuted=True,
    keys={
        **_GROUPED,
        _RMS_NORM: "layer_norm_epsilon",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
    },
    weights={
        "model.embeddings": "token_embd",
        "model.norm_f": "output_norm",
        **modules("mixer", QKV),
        **modules("mixer", GATED),
        **{f"mixer.{module}": tensor for module, tensor in EXPERTS.items()},
        **modules("mixer.shared_experts", SHARED),
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
    },
    adjust=configs.nemotron_h,
)
_GEMMA_NORMS = ("norm.weight",)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(model_type="llama", permuted=True, adjust=configs.llama),
    "mistral3": Family(model_type="ministral3", permuted=True, adjust=configs.mistral3),
    "smollm3": Family(model_type="smollm3", permuted=True),
    "arcee": Family(model_type="arcee", permuted=True),
    "granite": Family(model_type="granite", permuted=True, keys=_GRANITE, adjust=configs.granite),
    "granitemoe": Family(
        model_type="granitemoe", permuted=True, keys=_GRANITE, weights=GRANITE_EXPERTS, adjust=configs.granite
    ),
    "granitehybrid": Family(
        model_type="granitemoehybrid",
        permuted=True,
        keys=_GRANITE | _MAMBA2_KEYS,
        weights=GRANITE_EXPERTS,
        adjust=configs.granite_hybrid,
    ),
    "qwen2": Family(model_type="qwen2"),
    "qwen3": Family(model_type="qwen3"),
    "qwen2moe": Family(model_type="qwen2_moe", keys=_QWEN_EXPERTS, adjust=configs.qwen_experts),
    "qwen3moe": Family(model_type="qwen3_moe", keys=_QWEN_EXPERTS, adjust=configs.qwen_experts),
    "qwen3next": Family(
        model_type="qwen3_next",
        keys=_QWEN_EXPERTS | _DELTA_RULE,
        weights=DELTA_RULE,
        shifted=_DELTA_NORMS,
        adjust=configs.qwen_next,
    ),
    "qwen35": Family(
        model_type="qwen3_5_text",
        keys=_DELTA_RULE,
        weights=TILED_DELTA_RULE,
        shifted=_DELTA_NORMS,
        adjust=configs.qwen_next,
    ),
    "qwen35moe": Family(
        model_type="qwen3_5_moe_text",
        keys=_QWEN_EXPERTS | _DELTA_RULE,
        weights=TILED_DELTA_RULE,
        shifted=_DELTA_NORMS,
        adjust=configs.qwen_next,
    ),
    "gemma": Family(model_type="gemma", shifted=_GEMMA_NORMS),
    "gemma2": Family(
        model_type="gemma2",
        keys=_same("attn_logit_softcapping", "final_logit_softcapping"),
        weights=SANDWICH,
        shifted=_GEMMA_NORMS,
        adjust=configs.gemma,
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        keys=_same("final_logit_softcapping"),
        weights=SANDWICH,
        shifted=_GEMMA_NORMS,
        adjust=configs.gemma,
    ),
    "gemma3n": Family(
        model_type="gemma3n_text",
        keys={
            **_same("final_logit_softcapping"),
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
        },
        weights={
            **SANDWICH,
            **PER_LAYER_INPUT,
            "model.altup_projections": Source(("altup_proj",), index=True),
            "model.altup_unembed_projections": Source(("altup_unembd_proj",), index=True),
            "altup.correct_output_scale": "altup_correct_scale.weight",
            "altup.correction_coefs": "altup_correct_coef",
            "altup.prediction_coefs": "altup_predict_coef",
            "altup.modality_router": "altup_router",
            "altup.router_norm": "altup_router_norm",
            "laurel.linear_left": "laurel_l",
            "laurel.linear_right": "laurel_r",
            "laurel.post_laurel_norm": "laurel_post_norm",
        },
        adjust=configs.gemma3n,
    ),
    "gemma4": Family(
        model_type="gemma4_text",
        keys={
            **_same("final_logit_softcapping"),
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        weights={
            **SANDWICH,
            **PER_LAYER_INPUT,
            "layer_scalar": "layer_output_scale.weight",
            "router.proj": "ffn_gate_inp",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "experts.gate_up_proj": GATE_UP,
            "experts.down_proj": "ffn_down_exps.weight",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
        },
        adjust=configs.gemma4,
    ),
    "lfm2": Family(
        model_type="lfm2",
        keys={_RMS_NORM: "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        weights=SHORT_CONVOLUTION,
        adjust=configs.lfm2,
    ),
    "lfm2moe": Family(
        model_type="lfm2_moe",
        keys={
            **_QWEN_EXPERTS,
            _RMS_NORM: "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
            "leading_dense_block_count": "num_dense_layers",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
        },
        weights=SHORT_CONVOLUTION,
        adjust=configs.lfm2,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "falcon-h1": Family(model_type="falcon_h1", keys=_MAMBA2_KEYS, adjust=configs.falcon_h1),
    "mamba2": Family(
        model_type="mamba2",
        keys={
            _RMS_NORM: "layer_norm_epsilon",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.group_count": "n_groups",
        },
        weights={"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm"},
        adjust=configs.mamba2,
    ),
    "deepseek2": Family(
        model_type="deepseek_v3",
        keys={**_GROUPED, "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"},
        adjust=configs.deepseek,
    ),
    "glm4": Family(
        model_type="glm4",
        weights={"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    ),
    "glm4moe": Family(model_type="glm4_moe", keys=_GROUPED, weights=AFTER_ATTENTION, adjust=configs.glm4_moe),
    "gpt-oss": Family(
        model_type="gpt_oss",
        keys=_LOCAL,
        weights={
            **AFTER_ATTENTION,
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_up_proj": Source(GATE_UP.tensors, rows=alternating_rows, transposed=True),
            "mlp.experts.gate_up_proj_bias": Source(("ffn_gate_exps.bias", "ffn_up_exps.bias"), rows=alternating_rows),
            "mlp.experts.down_proj": Source(("ffn_down_exps.weight",), transposed=True),
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
        adjust=configs.gpt_oss,
    ),
    "minimax-m2": Family(
        model_type="minimax_m2",
        keys={**_LOCAL, "expert_feed_forward_length": "intermediate_size"},
        adjust=configs.minimax,
    ),
    "phi3": Family(model_type="phi3", adjust=configs.phi3),
    "stablelm": Family(
        model_type="stablelm",
        keys=_EPSILON_OF_LAYER_NORM,
        weights={
            "self_attn.q_layernorm.norms": Source(("attn_q_norm",), index=True),
            "self_attn.k_layernorm.norms": Source(("attn_k_norm",), index=True),
        },
        adjust=configs.stablelm,
    ),
    "starcoder2": Family(
        model_type="starcoder2",
        keys={_LAYER_NORM: "norm_epsilon"},
        weights={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    ),
    "gpt2": Family(
        model_type="gpt2",
        keys={
            "context_length": "n_positions",
            "block_count": "n_layer",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            _LAYER_NORM: "layer_norm_epsilon",
        },
        weights={
            "transformer.wte": "token_embd",
            "transformer.wpe": "position_embd",
            "transformer.ln_f": "output_norm",
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": Source(("attn_qkv",), transposed=True),
            "attn.c_proj": Source(("attn_output",), transposed=True),
            "mlp.c_fc": Source(("ffn_up",), transposed=True),
            "mlp.c_proj": Source(("ffn_down",), transposed=True),
        },
    ),
    "phi2": Family(
        model_type="phi",
        keys=_EPSILON_OF_LAYER_NORM,
        weights={"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
    ),
    "command-r": Family(model_type="cohere", keys=_EPSILON_OF_LAYER_NORM | _same("logit_scale")),
    "cohere2": Family(
        model_type="cohere2", keys=_EPSILON_OF_LAYER_NORM | _same("logit_scale"), adjust=configs.every_fourth_full
    ),
    "olmo2": Family(model_type="olmo2", weights=SANDWICH, adjust=configs.olmo2),
    "olmoe": Family(model_type="olmoe", keys=_ROUTED, adjust=configs.olmoe),
    "exaone4": Family(model_type="exaone4", weights=SANDWICH, adjust=configs.every_fourth_full),
    "ernie4_5": Family(model_type="ernie4_5"),
    "seed_oss": Family(model_type="seed_oss", weights=AFTER_ATTENTION),
    "hunyuan-dense": Family(
        model_type="hunyuan_v1_dense",
        weights={"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    ),
    "nemotron": Family(model_type="nemotron", keys={_LAYER_NORM: "norm_eps"}, shifted=_GEMMA_NORMS),
}
