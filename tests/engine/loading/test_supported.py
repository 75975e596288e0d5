"""The check of a model's logits over slots, before it is served."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from engine.loading.supported import check_config, check_modules, try_out
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import tiny_model


def test_logits_that_the_next_call_overwrites_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs write all logits to the same memory."""
    logits, memory = Runner.logits, torch.empty(64, 1024)

    def overwriting(runner: Runner, rows: Sequence[RowInput]) -> Tensor:
        result = logits(runner, rows)
        return memory[: len(result), : runner.vocab_size].copy_(result)

    monkeypatch.setattr(Runner, "logits", overwriting)
    try_out(tiny_model("llama-gqa"))


SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LLAMA_4 = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64}
ATTENTION_ONLY = {"layer_types": ["attention"] * 2, "shared_intermediate_size": 48, "num_local_experts": 0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
LONGCAT = {"num_layers": 1, "ffn_hidden_size": 48, "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 16}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("nemotron", {}),  # its layers hand no arguments to their attention
        ("stablelm", {}),  # neither do these
        ("doge", {}),
        ("deepseek_v3", LATENT | EXPERTS),
        ("minicpm3", LATENT),
        ("llama4_text", LLAMA_4),  # attention in chunks, which are longer than these texts
        ("longcat_flash", LATENT | EXPERTS | LONGCAT | {"head_dim": 8}),
        ("granitemoehybrid", MAMBA | ATTENTION_ONLY),  # its class carries states, this model does not
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families_that_run_over_slots(family: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SHAPE | options)).float().eval()
    check_config(model.config, max_length=64)
    check_modules(model)
    try_out(model)
