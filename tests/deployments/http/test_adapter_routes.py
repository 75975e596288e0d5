"""Adapters are models of their own, and come and go while the server runs."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM

from actors.replica.in_process import Engine
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.configuration.config import ServerConfig, parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from tests.support.adapters import save_adapter
from tests.support.waiting import wait_until

TARGET = ROOT / "models" / "target"
PROMPT = {"prompt": "Why is the sky", "max_tokens": 12, "temperature": 0}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("poet", "sql", "other"), 1):
        model = AutoModelForCausalLM.from_pretrained(TARGET)
        save_adapter(folder / name, model, seed, r=24 if name == "other" else 4)
    return folder


def config(folder: Path, *, more: int) -> ServerConfig:
    target = {"path": str(TARGET), "adapters": {"poet": "poet"}, "adapters_at_run_time": more, "dtype": "float32"}
    endpoint = {"target": "target", "ngram": {}}
    http = {"cached_tokens": 10_000}
    return parse_config({"models": {"target": target}, "endpoints": {"base": endpoint}, "http": http}, folder=folder)


def serve(config: ServerConfig, keys: KeyRing | None = None) -> Iterator[TestClient]:
    model = config.models["target"]
    spec: ModelSpec = model.spec("target")
    with Engine({"target": ("target", load_runner(spec))}) as engine:
        service = Service(load_endpoints(config), engine.coordinator, cached_tokens=config.http.cached_tokens)
        with TestClient(make_api(service, keys=keys)) as client:
            yield client
        engine.check()


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    yield from serve(config(folder, more=1))


def text(client: TestClient, model: str) -> str:
    answer = client.post("/v1/completions", json={"model": model, **PROMPT})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def problem(client: TestClient, path: str, body: dict[str, Any]) -> tuple[int, str]:
    answer = client.post(path, json=body)
    return answer.status_code, answer.json()["error"]["message"]


def names(client: TestClient) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_a_configured_adapter_is_a_model(client: TestClient, folder: Path) -> None:
    base, poet = client.get("/v1/models").json()["data"]
    assert (base["id"], base["root"], base["parent"]) == ("base", "target", None)
    assert (poet["id"], poet["root"], poet["parent"]) == ("poet", str(folder / "poet"), "base")
    assert client.get("/v1/models/poet").json() == poet
    assert text(client, "poet") != text(client, "base")
    assert text(client, "poet") == client.post("/poet/v1/completions", json=PROMPT).json()["choices"][0]["text"]
    statuses = {status["name"]: status["totals"] for status in client.get("/v1/status").json()["endpoints"]}
    assert statuses["poet"]["requests"] >= 1
    metrics = client.get("/metrics").text
    assert 'model_name="poet"' in metrics
    (info,) = (line for line in metrics.splitlines() if line.startswith("vllm:lora_requests_info{"))
    assert 'max_lora="2",running_lora_adapters="",waiting_lora_adapters=""' in info
    assert float(info.split()[-1]) == pytest.approx(time.time(), abs=600)


def test_adapters_are_loaded_and_unloaded(client: TestClient, folder: Path) -> None:
    before = text(client, "base")
    body = {"lora_name": "sql", "lora_path": str(folder / "sql")}
    answer = client.post(LOAD, json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert names(client) == ["base", "poet", "sql"]
    assert len({text(client, name) for name in names(client)}) == 3
    assert problem(client, LOAD, body) == (
        400,
        "lora_name: the adapter 'sql' is there already; unload it first, or set load_inplace: true",
    )
    status, reason = problem(client, LOAD, {"lora_name": "more", "lora_path": str(folder / "sql")})
    assert (status, reason.split(";")[0]) == (400, "lora_name: 'base' has 2 adapters, as many as it may")
    assert client.post(UNLOAD, json={"lora_name": "sql"}).status_code == 200
    status, reason = problem(client, "/v1/completions", {"model": "sql", **PROMPT})
    assert (status, reason.split(";")[0]) == (404, "model: there is no model 'sql'")
    assert problem(client, UNLOAD, {"lora_name": "sql"})[0] == 404
    assert text(client, "base") == before


def test_a_name_can_get_other_weights(client: TestClient, folder: Path) -> None:
    """Neither cached answers nor cached prompts are those of the weights before."""
    for name in ("sql", "poet"):
        body = {"lora_name": "new", "lora_path": str(folder / name), "load_inplace": True}
        assert client.post(LOAD, json=body).status_code == 200
        texts = [text(client, "new"), text(client, "new")]
        assert texts[0] == texts[1]
        assert (texts[0] == text(client, "poet")) == (name == "poet")
    assert client.post(UNLOAD, json={"lora_name": "new"}).status_code == 200


def test_requests_in_progress_end_with_an_adapter_that_is_unloaded(client: TestClient, folder: Path) -> None:
    load = {"lora_name": "sql", "lora_path": str(folder / "sql")}
    long = {"model": "sql", **PROMPT, "max_tokens": 300, "ignore_eos": True}

    def answer(salt: str) -> str:
        response = client.post("/v1/completions", json={**long, "cache_salt": salt})
        return str(response.json()["choices"][0]["text"])

    def is_running() -> bool:
        return bool(client.get("/v1/status").json()["requests"]["running"])

    assert client.post(LOAD, json=load).status_code == 200
    undisturbed = answer("one")
    with ThreadPoolExecutor(1) as asking:
        unloaded = asking.submit(answer, "another")
        wait_until(is_running, "the request has begun")
        assert client.post(UNLOAD, json={"lora_name": "sql"}).status_code == 200
        assert unloaded.result() == undisturbed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "base"}, "lora_name: a model 'base' is there already; take another name"),
        ({"lora_name": "metrics"}, "lora_name.metrics: /metrics is a route of the server"),
        ({"lora_name": "x", "base_model_name": "poet"}, "base_model_name: 'poet' takes no adapters at run time"),
        ({"lora_name": "x", "lora_path": "./sql"}, "lora_path: there is no folder or .gguf file './sql'"),
        ({"lora_name": "x", "lora_path": "{folder}/nothing"}, "lora_path: there is no folder or .gguf file '/"),
        ({"lora_name": "x", "lora_path": "{folder}"}, "it has no adapter_config.json; save it as peft does"),
        ({"lora_name": "x", "lora_path": "{folder}/other"}, "its rank is 24, but max_adapter_rank is 16; raise that"),
        ({"lora_name": "x", "path": "y"}, "path: is not known"),
    ],
)
def test_mistakes_are_named(body: dict[str, str], message: str, client: TestClient, folder: Path) -> None:
    body = {name: value.format(folder=folder) for name, value in body.items()}
    status, reason = problem(client, LOAD, {"lora_path": str(folder / "sql")} | body)
    assert status == 400
    assert message in reason
    assert names(client) == ["base", "poet"]


def test_a_configuration_must_permit_it(folder: Path) -> None:
    for fixed in serve(config(folder, more=0)):
        status, reason = problem(fixed, LOAD, {"lora_name": "sql", "lora_path": str(folder / "sql")})
        assert status == 403
        assert reason.endswith("no adapters may be loaded or unloaded here; set models.NAME.adapters_at_run_time")
        assert fixed.post(UNLOAD, json={"lora_name": "poet"}).status_code == 403


def test_it_takes_an_admins_key(folder: Path) -> None:
    keys = KeyRing([ApiKey("admin", digest_of("a"), admin=True), ApiKey("user", digest_of("u"))])
    for guarded in serve(config(folder, more=1), keys):
        body = {"lora_name": "sql", "lora_path": str(folder / "sql")}
        statuses = [
            guarded.post(LOAD, json=body, headers={"Authorization": f"Bearer {secret}"}).status_code
            for secret in ("", "u", "a")
        ]
        assert statuses == [401, 403, 200]
