"""From a model or a configuration to what is served: names, drafters, sizes and devices. Loads nothing."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from decoding.errors import ConfigError
from deployments.configuration.config import ServerConfig, parse_config
from deployments.configuration.model import ModelConfig
from deployments.configuration.paths import ROOT
from deployments.planning.devices import Gpu, Machine
from deployments.planning.model_server import ModelServer
from deployments.planning.model_size import size_of
from deployments.planning.plan import GIB, demands_of, give_cluster_gpus, plan_server, planned
from engine.kernels.quantized_weight import Quantization
from engine.loading.gguf.files import _cache_of
from engine.loading.quantization import weight_bytes
from tests.support.models import tiny_model

TARGET, DRAFTER = str(ROOT / "models" / "target"), str(ROOT / "models" / "drafter")
LAPTOP = Machine((), 2, 8 * GIB)
WORKSTATION = Machine((Gpu(0, 24 * GIB, 23 * GIB), Gpu(1, 24 * GIB, 23 * GIB)), 16, 64 * GIB)


def config(**models: dict[str, Any]) -> ServerConfig:
    names = list(models)
    endpoint = {"target": names[0]} | ({"drafter": names[1]} if len(names) > 1 else {})
    return parse_config({"models": models, "endpoints": {"e": endpoint}}, folder=ROOT)


def test_a_model_is_named_after_its_folder_and_drafted_by_n_grams() -> None:
    served = ModelServer(model=TARGET).config()
    assert list(served.models) == list(served.endpoints) == ["target"]
    endpoint = served.endpoints["target"]
    assert (endpoint.target, endpoint.drafter, endpoint.ngram is not None) == ("target", None, True)
    assert not ModelServer(model=TARGET, drafter="none").config().endpoints["target"].drafts


def test_a_drafter_and_names_of_the_endpoints() -> None:
    keys = {"max_length": 512, "dtype": "float32"}
    served = ModelServer(model=TARGET, drafter=DRAFTER, served_names=["a", "b"], target_keys=keys).config()
    assert list(served.models) == ["target", "drafter"]
    assert {name: endpoint.drafter for name, endpoint in served.endpoints.items()} == {"a": "drafter", "b": "drafter"}
    assert (served.models["target"].max_length, served.models["target"].dtype) == (512, "float32")
    copy = ModelServer(model=TARGET, drafter=TARGET).config()
    assert list(copy.models) == ["target", "target-drafter"]


def test_an_id_of_the_hub_is_what_clients_ask_for() -> None:
    served = ModelServer(model="Org/Model-1.5B").config()
    assert (list(served.models), list(served.endpoints)) == (["Model-1.5B"], ["Org/Model-1.5B"])


def test_the_bundled_model_has_heads_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    monkeypatch.chdir(tmp_path)  # whatever the working directory
    for model in ("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path)):
        (endpoint,) = ModelServer(model=model).config().endpoints.values()
        assert endpoint.heads is not None
        assert str(endpoint.heads.path).endswith("models/smollm2-eagle3")
    (endpoint,) = ModelServer(model="HuggingFaceTB/SmolLM2-360M-Instruct").config().endpoints.values()
    assert endpoint.heads is None


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("./nowhere", r"MODEL: there is no folder or \.gguf file"),
        ("~/nowhere/at/all", r"MODEL: there is no folder or \.gguf file"),
        ("some.gguf", r"MODEL: there is no folder or \.gguf file 'some\.gguf'; a model is a folder"),
        ("", r"MODEL: is empty; a model is a folder"),
        (
            str(ROOT / "README.md"),
            r"README\.md' is a file; give its folder, .* a model is a folder, .* a configuration ends in \.yaml",
        ),
        ("package:no_such_package/file", "there is no Python package"),
    ],
)
def test_a_model_that_is_not_there(model: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ModelServer(model=model).config()


def test_sizes_come_from_headers() -> None:
    stored = size_of(ModelConfig(path=TARGET), TARGET)
    assert stored is not None
    assert stored.kv_bytes is not None
    wide = size_of(ModelConfig(path=TARGET, dtype="float32"), TARGET)
    narrow = size_of(ModelConfig(path=TARGET, dtype="bfloat16"), TARGET)
    few = size_of(ModelConfig(path=TARGET, quantization="nf4", dtype="bfloat16"), TARGET)
    assert wide is not None
    assert narrow is not None
    assert few is not None
    assert wide.weights_bytes == 2 * narrow.weights_bytes
    assert few.weights_bytes < narrow.weights_bytes
    assert narrow.kv_bytes == (wide.kv_bytes or 0) // 2
    header = json.loads((ROOT / "models" / "target" / "config.json").read_text(encoding="utf-8"))
    numbers = 2 * header["num_hidden_layers"] * header["num_key_value_heads"] * header["head_dim"]
    assert wide.kv_bytes == numbers * 4
    assert stored.positions == header["max_position_embeddings"]


def test_headers_that_say_little(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        size_of(ModelConfig(path="x"), str(tmp_path))
    (tmp_path / "config.json").write_text('{"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 99}')
    assert size_of(ModelConfig(path="x"), str(tmp_path)) is None
    size = size_of(ModelConfig(path="x"), str(tmp_path), weights_bytes=5)
    assert size is not None
    assert (size.weights_bytes, size.kv_bytes, size.positions) == (5, 2 * 64 * 2 * 2, 99)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        size_of(ModelConfig(path="x"), str(tmp_path))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kind", ["nf4", "int4", "int8"])
def test_a_quantised_model_takes_what_was_foretold(family: str, kind: Quantization, tmp_path: Path) -> None:
    model = tiny_model(family, hidden_size=128, intermediate_size=256, head_dim=32)
    model.save_pretrained(tmp_path)
    size = size_of(ModelConfig(path="x", quantization=kind), str(tmp_path))
    assert size is not None
    assert size.weights_bytes == pytest.approx(weight_bytes(model, torch.float32, kind), rel=0.01)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("mixtral", False)])
def test_a_token_reads_neither_the_embedding_nor_experts_that_it_does_not_choose(
    family: str, tied: bool, tmp_path: Path
) -> None:
    model: Any = tiny_model(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    size = size_of(ModelConfig(path="x"), str(tmp_path))
    assert size is not None
    every = sum(weight.numel() for weight in model.parameters())  # a tied output layer counts once
    unread = 0 if tied else model.get_input_embeddings().weight.numel()
    if family == "mixtral":
        experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
        unread += experts * (1 - model.config.num_experts_per_tok / model.config.num_local_experts)
        assert 0 < experts < every
    assert (size.weights_bytes, size.step_bytes) == (4 * every, 4 * (every - unread))


def test_a_model_of_known_bytes_only_is_planned_as_it_will_be_loaded(tmp_path: Path) -> None:
    header: dict[str, Any] = {"dtype": "bfloat16", "vocab_size": 100, "hidden_size": 1000}  # embeddings: 200,000

    def weights(**keys: Any) -> int:
        (tmp_path / "config.json").write_text(json.dumps(header), encoding="utf-8")
        size = size_of(ModelConfig(path="x", **keys), str(tmp_path), weights_bytes=2_000_000)
        assert size is not None
        return size.weights_bytes

    assert [weights(dtype=dtype) for dtype in ("auto", "float32")] == [2_000_000, 4_000_000]
    assert [weights(quantization=kind) for kind in ("nf4", "int8", "int4")] == [662_500, 1_062_500, 662_500]
    header["tie_word_embeddings"] = True
    assert weights(quantization="int8") == 1_062_500
    header["num_local_experts"] = 8
    assert weights(quantization="nf4") == 2_000_000
    header["quantization_config"] = {}
    assert weights(dtype="float32") == 2_000_000


def test_a_gguf_file_is_planned_as_it_will_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    shapes = {"blk.0.attn_output.weight": (64, 64), "blk.0.ffn_up_exps.weight": (2, 32, 64)}
    shapes |= dict.fromkeys(("token_embd.weight", "output.weight"), (99, 64))
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    full, small = (size_of(ModelConfig(path="x", quantization=kind), str(file)) for kind in (None, "int8"))
    assert full is not None
    assert small is not None
    assert full.weights_bytes - (full.step_bytes or 0) == 2 * 99 * 64
    assert full.weights_bytes - small.weights_bytes == (64 * 64 + 2 * 32 * 64 + 2 * 99 * 64) * (2 - 1.0625)
    stored = _cache_of(file) / "auto-stored"  # converted for a model whose weights don't change
    stored.mkdir(parents=True)
    assert size_of(ModelConfig(path="x", quantization="int8"), str(file)) == small


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.path: .* has no config\.json; give the folder of a checkpoint"):
        plan_server(config(m={"path": str(tmp_path)}), LAPTOP)


def test_a_plan_fills_what_a_file_leaves_open() -> None:
    served = config(target={"path": TARGET}, drafter={"path": DRAFTER, "num_gpus": 0, "threads": 3})
    result = planned(served, plan_server(served, WORKSTATION)).models
    assert (result["target"].num_gpus, result["target"].threads) == (1, None)
    assert (result["drafter"].num_gpus, result["drafter"].threads) == (0, 3)
    result = planned(served, plan_server(served, LAPTOP)).models
    assert (result["target"].num_gpus, result["target"].threads) == (0, 1)


@pytest.mark.parametrize(("device", "devices"), [("balanced", 2), ("auto", 1)])
def test_a_balanced_model_is_spread_over_the_gpus_of_its_replica(device: str, devices: int) -> None:
    served = config(target={"path": TARGET, "device": device, "num_gpus": 2})
    assert [demand.devices for demand in demands_of(served)] == [devices]


def test_a_colocated_drafter_has_no_keys_for_replicas() -> None:
    served = config(target={"path": TARGET, "slots": 4}, drafter={"path": DRAFTER, "slots": 4})
    plan = plan_server(served, LAPTOP, may_colocate={"drafter"})
    drafter = planned(served, plan).models["drafter"]
    assert (drafter.colocated_with, "slots" in drafter.model_fields_set) == ("target", False)


def test_models_of_a_cluster_get_a_gpu_each() -> None:
    served = config(target={"path": TARGET, "replicas": 2}, drafter={"path": DRAFTER})

    def given(gpus: float) -> list[float | None]:
        return [model.num_gpus for model in give_cluster_gpus(served, gpus).models.values()]

    assert (given(0), given(1), given(2), given(3)) == ([0, 0], [1, 0], [1, 0], [1, 1])
    fixed = config(target={"path": TARGET, "num_gpus": 0}, drafter={"path": DRAFTER, "colocated_with": "target"})
    assert [model.num_gpus for model in give_cluster_gpus(fixed, 4).models.values()] == [0, None]
    group = config(target={"path": TARGET, "tensor_parallel": 2})
    assert give_cluster_gpus(group, 0).models["target"].num_cpus == 1
