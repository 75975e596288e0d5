"""Weights are replaced over HTTP, and answers name them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM

from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.configuration.config import parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from engine.loading.new_weights import ReplaceableWeights
from engine.loading.runners import load_runner
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)
TARGET = ROOT / "models" / "target"
PROMPT = {"model": "base", "prompt": "Why is the sky", "max_tokens": 12, "temperature": 0}
VERSION = "X-Consort-Weights"
KEYS = [ApiKey("trainer", digest_of("trainer"), weights=True), ApiKey("admin", digest_of("admin"), admin=True)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, generator = tmp_path_factory.mktemp("weights"), torch.Generator().manual_seed(0)
    for name in ("one", "two"):
        model: Any = AutoModelForCausalLM.from_pretrained(TARGET)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        model.save_pretrained(folder / name)
    return [folder / "one", folder / "two"]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    yield from serve(weights_at_run_time=True)


def serve(**options: Any) -> Iterator[TestClient]:
    models = {"target": {"path": str(TARGET), **options}}
    config = parse_config({"models": models, "endpoints": {"base": {"target": "target"}}}, folder=ROOT)
    spec = config.models["target"].spec("target")
    runner = load_runner(spec)
    weights = ReplaceableWeights(runner, spec) if options else None
    with Engine({"target": ("target", runner)}, LoopOptions(weights=weights)) as engine:
        replaceable = {"target": lambda: spec} if options else {}
        service = Service(load_endpoints(config), engine.coordinator, cached_tokens=10_000, replaceable=replaceable)
        with TestClient(make_api(service, keys=KeyRing(KEYS)), headers={"Authorization": "Bearer trainer"}) as client:
            yield client
        engine.check()


def load(client: TestClient, path: Path, **options: Any) -> str:
    answer = client.post("/v1/weights", json={"model": "target", "path": str(path), **options})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "target"
    return str(answer.json()["version"])


def text(client: TestClient, version: str) -> str:
    answer = client.post("/v1/completions", json=PROMPT)
    assert (answer.headers[VERSION], answer.json()["system_fingerprint"]) == (version, version)
    return str(answer.json()["choices"][0]["text"])


def test_answers_name_the_weights_that_wrote_them(client: TestClient, folders: list[Path]) -> None:
    texts = {text(client, "0")}
    for number, folder in enumerate(folders, 1):
        version = load(client, folder)
        assert version.startswith(f"{number}-")
        texts |= {text(client, version), text(client, version)}  # the second is cached
        headers = {"Last-Event-ID": "0"}  # another version could not resume the stream, so events get no ids
        with client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}, headers=headers) as stream:
            assert stream.headers[VERSION] == version
            lines = list(stream.iter_lines())
        assert not any(line.startswith("id:") for line in lines)
        chunks = [line for line in lines if line.startswith("data: {")]
        assert all(f'"system_fingerprint":"{version}"' in chunk for chunk in chunks)
        chat = {"model": "base", "max_tokens": 4}
        for path, fields in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/responses", {"model": "base", "input": "hi", "max_output_tokens": 16}),
        ):
            body = fields if "model" in fields else {**chat, **fields}
            answer = client.post(path, json=body)
            assert answer.headers[VERSION] == version, answer.text
    assert len(texts) == 3


@pytest.mark.parametrize("policy", ["finish", "recompute"])
def test_a_whole_answer_in_progress_ends_as_the_policy_says(
    client: TestClient, folders: list[Path], policy: str
) -> None:
    before = load(client, folders[1])

    def is_running() -> bool:
        return bool(client.get("/v1/status").json()["requests"]["running"])

    body = {**PROMPT, "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(client.post, "/v1/completions", json={**body, "cache_salt": policy})
        wait_until(is_running, "the request has begun")
        after = load(client, folders[0], policy=policy)
        answer = asked.result()
    assert answer.status_code == 200, answer.text
    assert answer.headers[VERSION] in ({before, after} if policy == "finish" else {after, before})
    load(client, folders[0] if answer.headers[VERSION] == after else folders[1])
    again = client.post("/v1/completions", json={**body, "cache_salt": "again"})
    assert again.json()["choices"][0]["text"] == answer.json()["choices"][0]["text"]
    assert answer.json()["usage"]["completion_tokens"] == 300


def test_what_can_not_be_loaded_is_refused_and_leaves_the_weights(client: TestClient, folders: list[Path]) -> None:
    version = load(client, folders[0])
    before = text(client, version)
    for body, reason in (
        ({"model": "base", "path": str(folders[1])}, "model: 'base' has no weights_at_run_time; "),
        ({"model": "target", "path": "models/target"}, "path: 'models/target' is relative"),
        ({"model": "target", "path": str(folders[0].parent)}, "path: "),
        ({"model": "target", "path": str(ROOT / "models" / "drafter")}, "path: "),
        ({"model": "target", "path": str(folders[1]), "policy": "drop"}, "policy: "),
    ):
        answer = client.post("/v1/weights", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(reason)
    assert text(client, version) == before


def test_a_model_sleeps_and_wakes(client: TestClient, folders: list[Path]) -> None:
    version = load(client, folders[1])
    before = text(client, version)
    assert client.post("/v1/sleep", json={"model": "target"}).json() == {"model": "target", "asleep": True}
    answer = client.post("/v1/completions", json={**PROMPT, "cache_salt": "new"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        503,
        "the model 'target' sleeps; POST /v1/wake wakes it",
    )
    (replica,) = client.get("/v1/status").json()["replicas"]
    assert replica["weights"] == {"version": version, "asleep": True, "error": None}
    state = client.get("/v1/status").json()
    assert (state["status"], [endpoint["ready"] for endpoint in state["endpoints"]]) == ("asleep", [False])
    assert client.get("/ready").status_code == 200  # the server is right as it is
    metrics = client.get("/metrics").text
    assert [line[-3:] for line in metrics.splitlines() if line.startswith("vllm:engine_sleep_state{")] == [
        *("0.0", "0.0", "1.0")
    ]
    assert client.post("/v1/wake", json={"model": "target"}).json() == {"model": "target", "asleep": False}
    salted = client.post("/v1/completions", json={**PROMPT, "cache_salt": "new"})  # no cached answer
    assert (salted.json()["choices"][0]["text"], salted.headers[VERSION]) == (before, version)
    assert client.post("/v1/sleep", json={"model": "target"}).status_code == 200
    version = load(client, folders[0])
    assert client.post("/v1/wake", json={"model": "target"}).status_code == 200
    assert text(client, version) != before
    for path in ("/v1/sleep", "/v1/wake"):
        answer = client.post(path, json={"model": "base"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("model: 'base' has no weights_at_run_time; ")


def test_what_waits_when_a_model_falls_asleep_is_answered_or_told(client: TestClient) -> None:
    def ask(number: int) -> tuple[int, str]:
        body = {**PROMPT, "max_tokens": 60, "ignore_eos": True, "cache_salt": f"waiting {number}"}
        answer = client.post("/v1/completions", json=body)
        document = answer.json()
        return answer.status_code, document["choices"][0]["text"] if answer.is_success else document["error"]["message"]

    count = 24
    with ThreadPoolExecutor(count) as asking:
        asked = [asking.submit(ask, number) for number in range(count)]
        wait_until(lambda: bool(client.get("/v1/status").json()["requests"]["running"]), "requests have begun")
        assert client.post("/v1/sleep", json={"model": "target"}).status_code == 200
        answers = {future.result() for future in asked}
        assert client.post("/v1/wake", json={"model": "target"}).status_code == 200
        again = set(asking.map(ask, range(count)))
    assert len(again) == 1
    assert answers <= again | {(503, "the model 'target' sleeps; POST /v1/wake wakes it")}


def test_loads_that_come_at_once_are_made_in_order(client: TestClient, folders: list[Path]) -> None:
    first = load(client, folders[0])
    with ThreadPoolExecutor(4) as asking:
        versions = list(asking.map(lambda number: load(client, folders[number % 2]), range(4)))
    numbers = sorted(int(version.partition("-")[0]) for version in versions)
    assert numbers == [int(first.partition("-")[0]) + each for each in range(1, 5)]
    (replica,) = client.get("/v1/status").json()["replicas"]
    assert replica["weights"]["version"] == max(versions, key=lambda version: int(version.partition("-")[0]))


def test_only_keys_for_weights_may_replace_them(client: TestClient, folders: list[Path]) -> None:
    body = {"model": "target", "path": str(folders[0])}
    answer = client.post("/v1/weights", json=body, headers={"Authorization": "Bearer admin"})
    assert answer.status_code == 403
    assert "http.api_keys.NAME.weights: true" in answer.json()["error"]["message"]
    for other in serve():
        answer = other.post("/v1/weights", json=body)
        assert answer.status_code == 403
        assert "models.NAME.weights_at_run_time" in answer.json()["error"]["message"]
        answer = other.post("/v1/completions", json=PROMPT)
        assert VERSION not in answer.headers
        assert "system_fingerprint" not in answer.json()
