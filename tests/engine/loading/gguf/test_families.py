"""Models of GGUF files give the logits of the models that the files were made from."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from decoding.errors import ConfigError
from engine.layers.quantized_experts import QuantizedExperts, expert_matrices
from engine.loading.checkpoint import ModelSpec, load_config, load_model
from engine.loading.gguf.files import settings_folder
from engine.loading.gguf.header import StoredTensor
from tests.support import gguf_files
from tests.support.gguf_files import Change, plain, write_gguf

VOCAB = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 16,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 8,
}
DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "head_dim": 32,
}
DELTA_RULE_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
    "full_attention_interval": 4,
}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 48}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2}
MAMBA_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 128,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
MULTIPLIER_KEYS = {"embedding_scale": 12.0, "attention.scale": 0.2, "residual_scale": 0.22, "logit_scale": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA_3 = {**YARN, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LOGARITHM = {"mscale": 0.7, "mscale_all_dim": 0.7}
FACTORS = {"long_factor": [1.0 + step / 3 for step in range(8)], "short_factor": [1.0 + step / 9 for step in range(8)]}
SOFTMAX, SIGMOID = 1, 2


@dataclass(frozen=True)
class Case:
    """A family: its architecture, its type in transformers, and what they differ by from the others."""

    architecture: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    change: Change = plain


QUICK = {
    "llama, Llama 3's positions": Case(
        "llama", "llama", {"head_dim": 32, "rope_parameters": LLAMA_3}, {}, gguf_files.interleave
    ),
    "qwen3 with YaRN": Case("qwen3", "qwen3", {"head_dim": 64, "rope_parameters": YARN}),
    "qwen3next": Case(
        "qwen3next",
        "qwen3_next",
        SHARED_EXPERT | DELTA_RULE,
        DELTA_RULE_KEYS | {"rope.dimension_count": 8},
        gguf_files.delta_rule,
    ),
    "gemma3": Case(
        "gemma3",
        "gemma3_text",
        {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 32},
        {},
        gguf_files.add_one,
    ),
    "granitehybrid": Case(
        "granitehybrid",
        "granitemoehybrid",
        LOCAL_EXPERTS
        | MAMBA
        | MULTIPLIERS
        | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48},
        MAMBA_KEYS
        | MULTIPLIER_KEYS
        | {"attention.head_count_kv": [0, 2, 0, 2], "rope.scaling.finetuned": False, "rope.dimension_count": 16},
        gguf_files.granite,
    ),
    "deepseek2": Case(
        "deepseek2",
        "deepseek_v3",
        GROUPED_EXPERTS | LATENT | {"q_lora_rank": 24, "rope_parameters": YARN | LOGARITHM},
        LATENT_KEYS
        | {
            "attention.q_lora_rank": 24,
            "expert_weights_norm": True,
            "expert_gating_func": SIGMOID,
            "leading_dense_block_count": 1,
            "rope.scaling.yarn_log_multiplier": 0.07,
        },
        gguf_files.latent,
    ),
}
SLOW = {
    "llama with YaRN": Case("llama", "llama", {"rope_parameters": YARN | {"beta_fast": 16}}, {}, gguf_files.interleave),
    "llama with biases": Case("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}, gguf_files.interleave),
    "mistral3": Case(
        "mistral3",
        "ministral3",
        {"head_dim": 16, "rope_parameters": YARN | LOGARITHM | {"llama_4_scaling_beta": 0.3}},
        {"attention.temperature_scale": 0.3, "rope.scaling.yarn_log_multiplier": 0.7},
        gguf_files.interleave,
    ),
    "mistral3 before Ministral": Case("mistral3", "mistral", {"sliding_window": None}, {}, gguf_files.interleave),
    "smollm3": Case("smollm3", "smollm3", {}, {}, gguf_files.interleave),
    "arcee": Case("arcee", "arcee", {}, {}, gguf_files.interleave),
    "granite": Case("granite", "granite", MULTIPLIERS, MULTIPLIER_KEYS, gguf_files.interleave),
    "granitemoe": Case("granitemoe", "granitemoe", LOCAL_EXPERTS | MULTIPLIERS, MULTIPLIER_KEYS, gguf_files.granite),
    "granitemoe with shared experts": Case(
        "granitemoe",
        "granitemoeshared",
        LOCAL_EXPERTS | MULTIPLIERS | {"shared_intermediate_size": 48},
        MULTIPLIER_KEYS,
        gguf_files.granite,
    ),
    "bamba": Case(
        "granitehybrid",
        "bamba",
        MAMBA | {"attn_layer_indices": [1, 3]},
        MAMBA_KEYS | {"attention.head_count_kv": [0, 2, 0, 2], "rope.scaling.finetuned": True},
        gguf_files.mamba,
    ),
    "falcon-h1": Case(
        "falcon-h1",
        "falcon_h1",
        MAMBA
        | {
            "mamba_d_ssm": 128,
            "head_dim": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 1.3,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.9,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 1.1,
            "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 1.05],
            "ssm_in_multiplier": 0.9,
            "ssm_out_multiplier": 1.2,
            "mlp_multipliers": [0.8, 1.3],
        },
        MAMBA_KEYS,
        gguf_files.falcon_h1,
    ),
    "mamba2": Case(
        "mamba2",
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2},
        MAMBA_KEYS
        | {
            "attention.head_count": 0,
            "attention.head_count_kv": None,
            "attention.key_length": None,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "feed_forward_length": 0,
        },
        gguf_files.mamba,
    ),
    "nemotron_h": Case(
        "nemotron_h",
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*-M",
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
        },
        MAMBA_KEYS
        | {
            "attention.head_count_kv": [0, 2, 0, 0],
            "feed_forward_length": [0, 0, 96, 0],
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
        gguf_files.mamba,
    ),
    "nemotron_h_moe": Case(
        "nemotron_h_moe",
        "nemotron_h",
        {
            **GROUPED_EXPERTS,
            "hybrid_override_pattern": "M*EM",
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "moe_shared_expert_intermediate_size": 48,
        },
        MAMBA_KEYS
        | {
            "attention.head_count_kv": [0, 2, 0, 0],
            "feed_forward_length": [0, 0, 32, 0],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_shared_feed_forward_length": 48,
            "expert_weights_norm": True,
        },
        gguf_files.mamba,
    ),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen2moe": Case("qwen2moe", "qwen2_moe", SHARED_EXPERT | {"norm_topk_prob": False}),
    "qwen3moe": Case("qwen3moe", "qwen3_moe", EXPERTS | {"head_dim": 32}),
    "qwen35": Case(
        "qwen35",
        "qwen3_5_text",
        DELTA_RULE,
        DELTA_RULE_KEYS | {"rope.dimension_count": 8, "rope.dimension_sections": [11, 11, 10, 0]},
        gguf_files.tile_values,
    ),
    "qwen35moe": Case(
        "qwen35moe",
        "qwen3_5_moe_text",
        SHARED_EXPERT | DELTA_RULE,
        DELTA_RULE_KEYS | {"rope.dimension_count": 8, "rope.dimension_sections": [11, 11, 10, 0]},
        gguf_files.tile_values,
    ),
    "gemma": Case("gemma", "gemma", {"head_dim": 32}, {}, gguf_files.add_one),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
        {"attn_logit_softcapping": 50.0},
        gguf_files.add_one,
    ),
    "gemma3n": Case(
        "gemma3n",
        "gemma3n_text",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "num_hidden_layers": 10,
            "num_kv_shared_layers": 5,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.95] * 4 + [0.0] * 6,
        },
        {
            "feed_forward_length": 96,
            "attention.shared_kv_layers": 5,
            "embedding_length_per_layer_input": 8,
            "altup.num_inputs": 4,
            "altup.active_idx": 0,
            "activation_sparsity_scale": [1.6448536] * 4 + [float("-inf")] * 6,
            "attention.sliding_window_pattern": ([True] * 4 + [False]) * 2,
        },
        gguf_files.per_layer_inputs,
    ),
    "lfm2": Case(
        "lfm2",
        "lfm2",
        {"full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": False},
        {"attention.head_count_kv": [0, 2, 0, 2]},
        gguf_files.short_convolution,
    ),
    "lfm2moe": Case(
        "lfm2moe",
        "lfm2_moe",
        EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
        {"attention.head_count_kv": [0, 2, 0, 2], "leading_dense_block_count": 1, "expert_gating_func": SIGMOID},
        gguf_files.short_convolution,
    ),
    "deepseek2 with softmax": Case(
        "deepseek2",
        "deepseek_v2",
        GROUPED_EXPERTS | LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
        LATENT_KEYS | {"leading_dense_block_count": 1},
        gguf_files.latent,
    ),
    "glm4": Case("glm4", "glm4", {"head_dim": 16}),
    "glm4moe": Case(
        "glm4moe",
        "glm4_moe",
        GROUPED_EXPERTS | {"head_dim": 16, "use_qk_norm": True},
        {"expert_gating_func": SIGMOID, "expert_weights_norm": True, "leading_dense_block_count": 1},
    ),
    "gpt-oss": Case(
        "gpt-oss",
        "gpt_oss",
        LOCAL_EXPERTS | {"head_dim": 16, "sliding_window": 8},
        {"expert_feed_forward_length": 96},
        gguf_files.gpt_oss,
    ),
    "phi3 with longrope": Case(
        "phi3",
        "phi3",
        {"original_max_position_embeddings": 32, "rope_parameters": {**YARN, **FACTORS, "rope_type": "longrope"}},
        {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": (1 + 0.4) ** 0.5},
    ),
    "stablelm": Case("stablelm", "stablelm", {"use_qkv_bias": True}, {"use_parallel_residual": False}),
    "starcoder2": Case("starcoder2", "starcoder2", {"sliding_window": None}),
    "gpt2": Case(
        "gpt2",
        "gpt2",
        {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 128},
        {"attention.head_count_kv": None, "feed_forward_length": 256, "attention.layer_norm_epsilon": 1e-5},
        gguf_files.transposed,
    ),
    "nemotron": Case("nemotron", "nemotron", {}, {"attention.layer_norm_epsilon": 1e-5}, gguf_files.add_one),
    "phi2": Case("phi2", "phi", {"num_key_value_heads": 4}),
    "cohere2": Case("cohere2", "cohere2", {"sliding_window": 8}, {"logit_scale": 0.0625}),
    "olmo2": Case("olmo2", "olmo2"),
    "exaone4": Case(
        "exaone4", "exaone4", {"sliding_window": 8}, {"attention.sliding_window_pattern": [True, True, True, False]}
    ),
    "ernie4_5": Case("ernie4_5", "ernie4_5", {"head_dim": 16}),
}


def make(case: Case) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[case.model_type](**(SHAPE | case.config)))
    with torch.no_grad():
        for name, weight in model.state_dict(keep_vars=True).items():
            if weight.dim() < 2 or "norms" in name:
                weight += 0.1 * torch.randn(weight.shape)
            else:
                weight.normal_(std=0.15)
    return model.float().eval()


def write(folder: Path, case: Case, model: PreTrainedModel, **options: Any) -> Path:
    """Write a file with an empty tokenizer beside it, which is not read."""
    (folder / "tokenizer.json").write_text("{}")
    write_gguf(folder / "m.gguf", model, case.architecture, case.change, case.keys, **options)
    return folder / "m.gguf"


def logits(model: PreTrainedModel) -> Tensor:
    tokens = torch.randint(3, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        result: Tensor = model(input_ids=tokens, use_cache=False).logits
    return result


def load(path: Path, **options: Any) -> PreTrainedModel:
    return load_model(ModelSpec(name="m", path=str(path), dtype="float32", device="cpu", max_length=24, **options))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in QUICK.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
    ],
)
def test_its_logits_are_those_of_the_model_it_was_made_from(tmp_path: Path, case: Case) -> None:
    model = make(case)
    loaded = load(write(tmp_path, case, model))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_quantised_tensors_are_what_the_format_says(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Rows of queries and keys stand in another order in the file; their blocks stay whole."""
    model, case = make(QUICK["llama, Llama 3's positions"]), QUICK["llama, Llama 3's positions"]
    matrices = ("attn_q.weight", "attn_k.weight", "ffn_down.weight", "token_embd.weight")
    loaded = load(write(tmp_path, case, model, quantized=dict.fromkeys(matrices, kind)))
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            weight.data = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q4_0])
def test_activations_stay_where_a_file_has_no_integers(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    case = QUICK["llama, Llama 3's positions"]
    path = write(tmp_path, case, make(case), quantized={"ffn_down.weight": kind})
    spec = ModelSpec(name="m", path=str(path), device="cpu", max_length=24, activations="int8")
    if kind == GGMLQuantizationType.Q4_0:
        load_config(spec)
    else:
        with pytest.raises(ConfigError, match=r"^models\.m\.activations: int8 needs weights that are integers"):
            load_config(spec)


EXPERTS_OF = {
    "qwen3moe": Case("qwen3moe", "qwen3_moe", EXPERTS | {"head_dim": 32, "moe_intermediate_size": 96}),
    "gpt-oss": SLOW["gpt-oss"],
    "nemotron_h_moe": SLOW["nemotron_h_moe"],
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3moe", GGMLQuantizationType.Q4_0),
        ("gpt-oss", GGMLQuantizationType.MXFP4),
        ("nemotron_h_moe", GGMLQuantizationType.Q8_0),
    ],
)
def test_experts_stay_quantised(tmp_path: Path, name: str, kind: GGMLQuantizationType) -> None:
    """The unpacked values are the gguf package's."""
    case = EXPERTS_OF[name]
    matrices = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
    path = write(tmp_path, case, make(case), quantized=dict.fromkeys(matrices, kind))
    loaded, plain = load(path), load(path, unpacked=True)
    experts = [name for name, module in loaded.named_modules() if isinstance(module, QuantizedExperts)]
    assert experts == [name for name, module in plain.named_modules() if expert_matrices(module)] != []
    for name in experts:
        module: Any = loaded.get_submodule(name)
        original: Any = plain.get_submodule(name)
        for matrix in module.matrices:
            weight = module.quantized(matrix).dequantized()
            expected = original.get_parameter(matrix)
            torch.testing.assert_close(weight.mT if original.is_transposed else weight, expected, rtol=0, atol=0)
    torch.testing.assert_close(logits(loaded), logits(plain), rtol=1e-5, atol=1e-5)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    case = Case("glm4moe", "glm4_moe", SLOW["glm4moe"].config, SLOW["glm4moe"].keys | {"nextn_predict_layers": 1})
    model = make(case)
    longer = replace(case, keys=case.keys | {"block_count": 5})

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.4.nextn.enorm.weight", np.ones(64, dtype=np.float32))

    torch.testing.assert_close(logits(load(write(tmp_path, longer, model, add=add))), logits(model))


def add_tensor(name: str, *shape: int) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.ones(shape, dtype=np.float32))


@pytest.mark.parametrize(
    ("keys", "add", "problem"),
    [
        ({"attention.clamp_kqv": 4.0}, None, r"unknown keys .*qwen3\.attention\.clamp_kqv = 4\.0"),
        ({"rope.global.freq_base": 1e6}, None, r"qwen3\.rope\.global\.freq_base"),
        ({"rope.dimension_count": 16}, None, "rotates 16 of the 64"),
        ({"attention.causal": False}, None, "come after them"),
        ({"attention.key_length": 32}, None, r"blk\.0\.attn_q\.weight are \(256, 64\)"),
        ({"block_count": 5}, None, r"lacks 11 weights: model\.layers\.4"),
        ({}, add_tensor("blk.0.ffn_gate_inp.weight", 4, 64), r"1 unknown tensors: blk\.0\.ffn_gate_inp"),
    ],
)
def test_what_is_not_understood_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], add: Any, problem: str
) -> None:
    def no_reading(*arguments: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(StoredTensor, "values", no_reading)
    case = replace(QUICK["qwen3 with YaRN"], keys=keys)
    path = write(tmp_path, case, make(case), **({} if add is None else {"add": add}))
    with pytest.raises(ConfigError, match=rf"m\.gguf.*{problem}"):
        settings_folder(str(path))


def test_one_part_of_a_model_is_refused(tmp_path: Path) -> None:
    case = QUICK["qwen3 with YaRN"]
    path = write(tmp_path, case, make(case), add=lambda writer: writer.add_uint16("split.count", 2))
    with pytest.raises(ConfigError, match="one part of a model"):
        settings_folder(str(path))


def test_keys_that_say_nothing_are_no_reason(tmp_path: Path) -> None:
    case = replace(QUICK["qwen3 with YaRN"], keys={"expert_count": 0, "expert_weights_scale": 1.0, "pooling_type": 3})
    settings_folder(str(write(tmp_path, case, make(case))))
