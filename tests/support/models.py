"""Tiny models with random weights, one per family, big enough to have grouped heads and several layers."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 64
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, num_key_value_heads=4),
    "llama-gqa": LlamaConfig(**_SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**_SHAPE, num_key_value_heads=1, head_dim=16),
    "mistral": MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=None),
    "mistral-window": MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=9),
    "gemma3": Gemma3TextConfig(
        **_SHAPE,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma2": Gemma2Config(
        **_SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=7,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=9.0,
    ),
    "gpt-oss": GptOssConfig(
        **_SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "llama4": Llama4TextConfig(
        **_SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size_mlp=48,
        moe_layers=[],
        pad_token_id=0,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=8,
        floor_scale=5,
    ),
    "minicpm3": MiniCPM3Config(
        **_SHAPE,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=12,
    ),
    "deepseek": DeepseekV3Config(
        **_SHAPE,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=3,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "opt": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
    ),
    "phi": PhiConfig(**_SHAPE, num_key_value_heads=2),
    "mixtral": MixtralConfig(**_SHAPE, num_key_value_heads=2, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(
        **_SHAPE, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """Make a model with the same random weights every time. changes: to the configuration."""
    config = deepcopy(CONFIGS[family])
    config.update(changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(("sinks", "router.bias")):
                parameter.normal_(std=0.15, generator=generator)
    return model.eval().float()


def let_llama_count_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Llama ignore the positions that it is given, which its configuration does not show."""
    forward = LlamaForCausalLM.forward

    def counting(self: LlamaForCausalLM, *, position_ids: Tensor | None = None, **options: Any) -> Any:
        return forward(self, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counting)
