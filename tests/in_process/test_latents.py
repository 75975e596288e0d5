"""Models that keep latents in pages, not keys and values of each head: their memory, their texts, their drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.errors import ConfigError
from decoding.sampling.penalties import TOKEN_BYTES
from deployments.configuration.model import ModelConfig
from deployments.planning.model_size import size_of
from engine.loading.memory_budget import column_bytes
from engine.loading.quantizer import rounded_layers
from engine.loading.supported import try_out
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.families.configurations import VOCAB
from tests.in_process.test_hybrids import DRAFTED, LOOKED_UP, PLAIN, load, requests, texts
from tests.support.adapters import save_adapter
from tests.support.models import tiny_model

RANK, ROTATED = 24, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": 16,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LONGCAT = {"num_layers": 1, "ffn_hidden_size": 48, "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS,
    "deepseek_v2": EXPERTS | {"q_lora_rank": None},
    "minicpm3": {},
    "longcat_flash": EXPERTS | LONGCAT | {"head_dim": ROTATED},
    "glm4_moe_lite": EXPERTS,
    "youtu": {},
}
SAMPLE = {"deepseek_v2", "longcat_flash"}
PARAMS = [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in FAMILIES]


def make(family: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SHAPE | FAMILIES[family])).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model


@pytest.fixture(scope="module", params=PARAMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_are_the_same_with_drafts_and_in_company(folder: Path, dtype: str) -> None:
    drafter = Runner(tiny_model("llama"), slots=4, max_length=96, max_query=32)
    target = load(folder, dtype=dtype)
    with Engine({"target": ("target", target), "drafter": ("drafter", drafter)}, LoopOptions(adaptive=False)) as engine:
        alone = [texts(engine, [request])[0] for request in requests(PLAIN, temperature=0.8)]
        for endpoint in (PLAIN, DRAFTED, LOOKED_UP):
            assert texts(engine, requests(endpoint, temperature=0.8)) == alone


def test_pages_hold_a_latent_and_a_rotated_key_per_token(folder: Path) -> None:
    """Not keys of 20 and values of 16 numbers for each of 4 heads: 144 numbers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    numbers = model.config.num_hidden_layers * (RANK + ROTATED)
    assert sum(column_bytes(try_out(model)).values()) == 4 * numbers + TOKEN_BYTES
    planned = size_of(ModelConfig(path=str(folder)), str(folder))
    assert planned is not None
    assert planned.kv_bytes == 4 * numbers


def test_latents_of_fewer_bits(folder: Path) -> None:
    coarse, exact = load(folder, kv_dtype="float8_e4m3fn"), load(folder)
    rows = [RowInput(0, 0, list(range(3, 40)))]
    logits, expected = coarse.logits(rows).clone(), exact.logits(rows)
    assert 0 < (logits - expected).norm() < 0.2 * expected.norm()


def test_adapters_are_refused_where_latents_are_projected(tmp_path: Path) -> None:
    make("minicpm3").save_pretrained(tmp_path / "model")
    for name, layer in (("fitting", "kv_a_proj_with_mqa"), ("unfit", "kv_b_proj")):
        save_adapter(tmp_path / name, make("minicpm3"), 1, target_modules=[layer])
    load(tmp_path / "model", adapters={"a": str(tmp_path / "fitting")})
    with pytest.raises(ConfigError, match=r"kv_b_proj takes no adapters, because its latents are kept"):
        load(tmp_path / "model", adapters={"a": str(tmp_path / "unfit")})


def test_projections_of_latents_are_not_quantised() -> None:
    names = {name.rpartition(".")[2] for name, _, _ in rounded_layers(make("minicpm3"), "int4")}
    assert "kv_a_proj_with_mqa" in names
    assert "kv_b_proj" not in names


def plain_logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.arange(3, 20)[None]).logits
    return logits
