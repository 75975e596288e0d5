"""Which tensors of a GGUF file hold the weights of a model in transformers, and in which order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Source:
    """Where a file has a weight's values, and how to restore the weight.

    `rows`, `columns` and `transposed` move values without changing them. Only `compute` changes them.
    """

    tensors: tuple[str, ...]  # in layers without "blk.N."; several stand one below the other in the weight
    fallback: tuple[str, ...] = ()  # for files without these tensors
    rows: Callable[[PretrainedConfig], Tensor] | None = None  # which of their rows stands in each of the weight's
    columns: Callable[[PretrainedConfig], Tensor] | None = None
    transposed: bool = False
    index: bool = False  # the tensor holds the weights of a list of modules, by their number
    compute: Callable[[Sequence[Tensor], PretrainedConfig], Tensor] | None = None  # of the tensors


def _minus_exp(tensors: Sequence[Tensor], config: PretrainedConfig) -> Tensor:
    """Undo -exp(A_log)."""
    return torch.log(-tensors[0])


def _kv_b(tensors: Sequence[Tensor], config: PretrainedConfig) -> Tensor:
    """Join the two halves of latent attention's second projection [H (K + V), L]."""
    if len(tensors) == 1:
        return tensors[0]
    keys, values = tensors[0].transpose(1, 2), tensors[1]  # [H, K, L], [H, V, L]
    return torch.cat([keys, values], dim=1).flatten(0, 1)


def rotated_rows(heads: int, rows: int) -> Tensor:
    """Return for each row of queries or keys where it is in a file that alternates between a head's two halves."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def alternating_rows(config: PretrainedConfig) -> Tensor:
    """Return for each row of GPT-OSS's gate and up, which alternate in the model, where it is below the other one."""
    return torch.arange(2 * config.intermediate_size).view(2, -1).T.reshape(-1)


def _qkvz_rows(config: PretrainedConfig) -> Tensor:
    """Return the rows of in_proj_qkvz, which has q, k, v and z of each head together; the file has all q first."""
    heads, per_head = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [per_head * config.linear_value_head_dim] * 2
    parts = torch.arange(heads * sum(sizes)).split([heads * size for size in sizes])
    return torch.cat([part.view(heads, -1) for part in parts], dim=1).reshape(-1)


def _value_heads(config: PretrainedConfig, size: int) -> Tensor:
    """Return where the value heads are in a file that has the first head of every key head first. size: of a head."""
    heads, per_head = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    return torch.arange(heads * per_head * size).view(per_head, heads, size).transpose(0, 1).reshape(-1)


def _value_rows(config: PretrainedConfig) -> Tensor:
    return _value_heads(config, config.linear_value_head_dim)


def _value_numbers(config: PretrainedConfig) -> Tensor:
    return _value_heads(config, 1)


def _qkv_rows(config: PretrainedConfig) -> Tensor:
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([torch.arange(before), before + _value_rows(config)])


def modules(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return where the weights of a module's parts are. names: of the parts and their tensors."""
    return {f"{prefix}.{module}": tensor for module, tensor in names.items()}


QKV = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
GATED = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
SHARED = {module: f"{tensor}_shexp" for module, tensor in GATED.items()}
GATE_UP = Source(("ffn_gate_exps.weight", "ffn_up_exps.weight"), ("ffn_gate_up_exps.weight",))
EXPERTS: dict[str, str | Source] = {
    "gate": "ffn_gate_inp",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
    "experts.gate_up_proj": GATE_UP,
    "experts.up_proj": "ffn_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "shared_expert_gate": "ffn_gate_inp_shexp",
}
_MAMBA: dict[str, str | Source] = {
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "dt_bias": "ssm_dt.bias",
    "D": "ssm_d",
    "A_log": Source(("ssm_a",), compute=_minus_exp),
}
_LAYER: dict[str, str | Source] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "norm": "attn_norm",
    **modules("self_attn", QKV),
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": Source(("attn_k_b", "attn_v_b"), ("attn_kv_b",), compute=_kv_b),
    **modules("mlp", GATED),
    "mlp.gate_up_proj": "ffn_up",
    **{f"mlp.{module}": tensor for module, tensor in EXPERTS.items()},
    **modules("mlp.shared_expert", SHARED),
    **modules("mlp.shared_experts", SHARED),
    **modules("feed_forward", GATED),
    **{f"{block}.{module}": tensor for block in ("mamba", "mixer") for module, tensor in _MAMBA.items()},
}
_OUTER: dict[str, str | Source] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
}
WEIGHTS: Mapping[str, str | Source] = _LAYER | _OUTER

SANDWICH = {  # norms after attention and MLP as well as before
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}  # the same place, by another name
PER_LAYER_INPUT = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
DELTA_RULE: dict[str, str | Source] = {
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": Source(("ssm_a",), compute=_minus_exp),
    "linear_attn.in_proj_qkvz": Source(("attn_qkv", "attn_gate"), rows=_qkvz_rows),
    "linear_attn.in_proj_ba": "ssm_ba",
    **AFTER_ATTENTION,
}
TILED_DELTA_RULE: dict[str, str | Source] = DELTA_RULE | {
    "linear_attn.out_proj": Source(("ssm_out",), columns=_value_rows),
    "linear_attn.conv1d": Source(("ssm_conv1d",), rows=_qkv_rows),
    "linear_attn.dt_bias": Source(("ssm_dt.bias",), rows=_value_numbers),
    "linear_attn.A_log": Source(("ssm_a",), rows=_value_numbers, compute=_minus_exp),
    "linear_attn.in_proj_qkv": Source(("attn_qkv",), rows=_qkv_rows),
    "linear_attn.in_proj_z": Source(("attn_gate",), rows=_value_rows),
    "linear_attn.in_proj_b": Source(("ssm_beta",), rows=_value_numbers),
    "linear_attn.in_proj_a": Source(("ssm_alpha",), rows=_value_numbers),
}
SHORT_CONVOLUTION: dict[str, str | Source] = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.gate_up_proj": GATE_UP,
    "feed_forward.experts.down_proj": "ffn_down_exps.weight",
    "model.embedding_norm": "token_embd_norm",
}
GRANITE_EXPERTS: dict[str, str | Source] = {
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_up_proj": GATE_UP,
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "shared_mlp.input_linear": Source(("ffn_gate_shexp", "ffn_up_shexp"), ("ffn_gate", "ffn_up")),
    "shared_mlp.output_linear": Source(("ffn_down_shexp",), ("ffn_down",)),
}
