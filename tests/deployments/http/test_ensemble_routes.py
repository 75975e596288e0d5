"""Ensembles over HTTP: blends and strategies, whole and streamed, with changed options and failed members."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from fastapi.testclient import TestClient

from actors.loops.options import LoopOptions
from decoding.errors import ConfigError
from deployments.admission.bounds import Limits
from deployments.configuration.config import ServerConfig, load_config, parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from engine.loading.settings import load_tokenizer
from engine.loading.token_mappings import load_logits_mappings
from tests.deployments.conftest import tiny_runner
from tests.support.permuted import permutation, permuted_model, permuted_tokenizer
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from actors.replica.in_process import Engine
    from actors.replica.roles import Role
    from engine.model.runner import Runner

MODELS = ["target", "member", "drafter"]
STRATEGIES = ["rerank", "majority", "mbr", "best-of"]
BODY: dict[str, Any] = {"prompt": "import os", "max_tokens": 8, "temperature": 0.8, "seed": 5}


def slow_runner(seed: int) -> "Runner":
    """Slow blend, so that a member can fail in mid-stream."""
    runner = tiny_runner(seed)
    logits = runner.logits

    def slowly(*args: Any, **more: Any) -> Any:
        time.sleep(0.015)
        return logits(*args, **more)

    runner.logits = slowly  # type: ignore[method-assign]
    return runner


@pytest.fixture(scope="module")
def served() -> dict[str, ServedEndpoint]:
    return load_endpoints(load_config(ROOT / "deployments" / "ensemble.yaml"))


@pytest.fixture(scope="module")
def ensembles() -> "Iterator[Engine]":
    from actors.replica.in_process import Engine

    replicas: dict[str, tuple[Role, Runner]] = {
        name: ("both" if name == "drafter" else "target", tiny_runner(i)) for i, name in enumerate(MODELS)
    }
    with Engine(replicas) as engine:
        wait_until(lambda: len(engine.coordinator.models()) == 3, "replicas")
        yield engine


@pytest.fixture(scope="module")
def api(ensembles: "Engine", served: dict[str, ServedEndpoint]) -> Iterator[TestClient]:
    service = Service(served, ensembles.coordinator, limits=Limits(max_requests=64))
    with TestClient(make_api(service)) as client:
        yield client


def post(api: TestClient, model: str, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = api.post(path, json={**BODY, "model": model, **body})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def events(api: TestClient, model: str, **body: Any) -> list[dict[str, Any]]:
    with api.stream("POST", "/v1/completions", json={**BODY, "model": model, "stream": True, **body}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("model", ["ensemble", "contrastive", "contrastive-difference"])
def test_blends_say_who_contributed(api: TestClient, model: str) -> None:
    whole = post(api, model)
    (choice,) = whole["choices"]
    ensemble = choice["ensemble"]
    assert ensemble["blend"] == ("mixture" if model == "ensemble" else "contrastive")
    assert [member["model"] for member in ensemble["members"]] == [
        "target",
        "member" if model == "ensemble" else "drafter",
    ]
    assert all(member["answered"] and member["tokens"] == 8 for member in ensemble["members"])
    weights = {"ensemble": [0.5, 0.5], "contrastive": [1.5, -0.5], "contrastive-difference": [1, -1]}
    assert [member["weight"] for member in ensemble["members"]] == weights[model]
    streamed = events(api, model)
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]
    assert streamed[-1]["choices"][0]["ensemble"]["members"][1]["tokens"] == 8


@pytest.mark.parametrize("model", ["ensemble", "contrastive"])
def test_tokens_tell_what_members_thought_of_them(api: TestClient, model: str) -> None:
    (choice,) = post(api, model, return_token_details=True)["choices"]
    details = choice["token_details"]
    agreed = [[member["agreed"] for member in detail["members"]] for detail in details]
    assert [sum(column) / 8 for column in zip(*agreed, strict=True)] == [
        member["agreement"] for member in choice["ensemble"]["members"]
    ]
    for detail in details:
        assert [member["model"] for member in detail["members"]] == [
            member["model"] for member in choice["ensemble"]["members"]
        ]
        assert sum(member["share"] for member in detail["members"]) == pytest.approx(1, abs=1e-3)
    streamed = [event["choices"][0]["token_details"] for event in events(api, model, return_token_details=True)]
    chunks = [detail for event in streamed for detail in event]
    assert [[member["agreed"] for member in detail["members"]] for detail in chunks] == agreed
    for chunk, other in zip(chunks, details, strict=True):
        logprobs = [member["logprob"] for member in other["members"]]
        assert [member["logprob"] for member in chunk["members"]] == pytest.approx(logprobs, abs=1e-3)


def test_tokens_do_not_tell_of_members_where_nobody_wants_to_know(api: TestClient) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("rerank", {}), ("ensemble", {"return_members": False})]
    for model, more in cases:
        (choice,) = post(api, model, return_token_details=True, **more)["choices"]
        assert choice["token_details"]
        assert not any("members" in detail for detail in choice["token_details"])


def test_weights_and_parameters_of_a_request_count(api: TestClient) -> None:
    alone = post(api, "plain")["choices"][0]["text"]
    assert post(api, "ensemble", weights=[1, 0])["choices"][0]["text"] == alone
    assert post(api, "ensemble", weights=[0, 1])["choices"][0]["text"] != alone
    assert post(api, "contrastive", blend={"alpha": 0, "beta": 0})["choices"][0]["text"] == alone
    assert "ensemble" not in post(api, "ensemble", return_members=False)["choices"][0]
    assert "ensemble" not in post(api, "plain")["choices"][0]


@pytest.mark.parametrize("model", STRATEGIES)
def test_choices_among_whole_answers(api: TestClient, model: str) -> None:
    whole = post(api, model)
    (choice,) = whole["choices"]
    ensemble = choice["ensemble"]
    assert ensemble["strategy"] == model.replace("-", "_")
    assert [member["candidates"] for member in ensemble["members"]] == [3, 3]
    assert len(ensemble["candidates"]) == 6
    assert whole["usage"]["completion_tokens"] == sum(candidate["tokens"] for candidate in ensemble["candidates"])
    assert (ensemble.get("votes") is not None) == (model == "majority")
    streamed = events(api, model)
    progress = [event["progress"] for event in streamed if "progress" in event]
    assert [step["done"] for step in progress if step["event"] == "candidate"] == [1, 2, 3, 4, 5, 6]
    assert len([step for step in progress if step["event"] == "scored"]) == (2 if model == "rerank" else 0)
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]
    assert all(event["choices"][0]["finish_reason"] is None for event in streamed[:-1])


def test_several_prompts_choices_and_kinds_of_answers(api: TestClient) -> None:
    both = post(api, "best-of", prompt=["import os", "def f"], n=2)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["choices"][0]["text"] != both["choices"][1]["text"]
    assert both["choices"][0]["text"] == post(api, "best-of")["choices"][0]["text"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "prompt": None}
    body = {name: value for name, value in {**BODY, **chat}.items() if value is not None}
    answer = api.post("/v1/chat/completions", json={**body, "model": "majority"}).json()
    assert answer["choices"][0]["ensemble"]["strategy"] == "majority"
    asked = {"model": "ensemble", "input": "Hi", "max_output_tokens": 4, "seed": 5}
    response = api.post("/v1/responses", json=asked).json()
    assert [member["tokens"] for member in response["ensemble"]["members"]] == [4, 4]


def test_endpoints_have_base_urls(api: TestClient) -> None:
    expected = post(api, "ensemble")["choices"][0]["text"]
    answer = api.post("/ensemble/v1/completions", json=BODY).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("ensemble", expected)
    assert [card["id"] for card in api.get("/ensemble/v1/models").json()["data"]] == ["ensemble"]
    card = api.get("/v1/models/rerank").json()
    assert (card["kind"], card["members"], card["strategy"], card["ready"]) == (
        "ensemble",
        ["target", "member"],
        "rerank",
        True,
    )
    assert api.post("/v1/completions", json=BODY).json()["error"]["message"].startswith("model: is required")


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        ("plain", {"weights": [1]}, "weights"),
        ("ensemble", {"weights": [1]}, "weights"),
        ("ensemble", {"blend": {"alfa": 1}}, "blend.alfa"),
        ("contrastive", {"blend": {"alpha": 7}}, "blend.alpha"),
        ("mbr", {"blend": {"kind": "vote"}}, "blend"),
        ("ensemble", {"min_members": 3}, "min_members"),
        ("mbr", {"n": 12}, "n"),
    ],
)
def test_what_does_not_fit_is_refused(api: TestClient, model: str, body: dict[str, Any], field: str) -> None:
    answer = api.post("/v1/completions", json={**BODY, "model": model, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_a_member_that_is_gone_is_dropped_or_ends_it(served: dict[str, ServedEndpoint]) -> None:
    from actors.replica.in_process import Engine

    replicas: dict[str, tuple[Role, Runner]] = {name: ("target", tiny_runner(i)) for i, name in enumerate(MODELS)}
    with Engine(replicas) as engine:
        wait_until(lambda: len(engine.coordinator.models()) == 3, "replicas")
        with TestClient(make_api(Service(served, engine.coordinator))) as api:
            post(api, "mbr")
            engine.lose("member")
            wait_until(lambda: len(engine.coordinator.models()) == 2, "the loss")
            dropped = post(api, "rerank")["choices"][0]["ensemble"]["members"]
            assert [member["answered"] for member in dropped] == [True, False]
            assert [member["weight"] for member in dropped] == [1, 0]
            failed = api.post("/v1/completions", json={**BODY, "model": "mbr"})
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "unavailable")
            assert [api.get(f"/v1/models/{name}").json()["ready"] for name in ("rerank", "mbr")] == [True, False]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer of a copy of the target with permuted tokens."""
    folder = tmp_path_factory.mktemp("foreign")
    tokenizer = load_tokenizer(str(ROOT / "models" / "target"), None)
    permuted_tokenizer(tokenizer, permutation(2048)).save_pretrained(folder)
    (folder / "config.json").write_text((ROOT / "models" / "target" / "config.json").read_text())
    return folder


def with_foreign(folder: Path, **options: Any) -> ServerConfig:
    document = {
        "models": {"target": {"path": str(ROOT / "models" / "target")}, "other": {"path": str(folder)}},
        "endpoints": {"e": {"members": ["target", "other"], **options}, "plain": {"target": "target"}},
    }
    return parse_config(document, folder=ROOT)


def test_members_with_other_tokens_are_refused(foreign: Path) -> None:
    problem = r"endpoints\.e\.members: 'other' can't join 'target': its tokens are others.* set vocabulary to union"
    with pytest.raises(ConfigError, match=problem):
        load_endpoints(with_foreign(foreign))


def test_members_with_other_tokens_join_through_text(foreign: Path) -> None:
    """The report is shown, the permuted copy changes no text, and an impossible blend is refused."""
    from actors.replica.in_process import Engine
    from engine.model.runner import Runner

    config = with_foreign(foreign, vocabulary="union")
    leader = tiny_runner(0)
    other = Runner(permuted_model(tiny_runner(0).model, permutation(2048)), slots=4, max_length=1024, max_query=256)
    specs = [config.models[name].spec(name) for name in ("other", "target")]
    own_options = {"other": LoopOptions(logits_mappings=load_logits_mappings(specs[0], specs[1:]))}
    with Engine({"target": ("target", leader), "other": ("target", other)}, own_options=own_options) as engine:
        wait_until(lambda: len(engine.coordinator.models()) == 2, "replicas")
        with TestClient(make_api(Service(load_endpoints(config), engine.coordinator))) as api:
            choice = post(api, "e")["choices"][0]
            assert choice["text"] == post(api, "plain")["choices"][0]["text"]
            assert [member["tokens"] for member in choice["ensemble"]["members"]] == [8, 8]
            card, status = api.get("/v1/models/e").json(), api.get("/v1/status").json()["endpoints"]
            assert card["through_text"]["other"].startswith("2048 of 2048 token strings are among the target's 2048")
            assert [endpoint["through_text"] for endpoint in status] == [card["through_text"], {}]
            refused = api.post("/v1/completions", json={**BODY, "model": "e", "blend": {"kind": "product"}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "blend.kind")


def test_interpreters_are_made_for_members_with_other_tokens_alone(foreign: Path) -> None:
    config = with_foreign(foreign, vocabulary="union")
    specs = {name: config.models[name].spec(name) for name in ("other", "target")}
    assert list(load_logits_mappings(specs["other"], [specs["target"], specs["other"]])) == ["target"]


def test_requests_carry_what_they_change(served: dict[str, ServedEndpoint]) -> None:
    from deployments.apis.completions.request import CompletionRequest

    body = CompletionRequest(model="ensemble", prompt=["a"], weights=[3, 1], member_timeout_ms=20)
    (request,) = served["ensemble"].prepare(body, seed=0)
    assert list(request.ensemble_options.blend.weights) == [3, 1]
    assert request.ensemble_options.member_timeout_s == 0.02
    assert request.ensemble_options.on_member_failure == "drop"


@pytest.mark.parametrize("policy", ["drop", "fail"])
def test_a_member_stops_answering_in_mid_stream(served: dict[str, ServedEndpoint], policy: str) -> None:
    from actors.ensemble.member import MemberRow
    from actors.replica.in_process import Engine

    replicas: dict[str, tuple[Role, Runner]] = {name: ("target", slow_runner(i)) for i, name in enumerate(MODELS)}
    body = {**BODY, "model": "ensemble", "max_tokens": 30, "stream": True, "ignore_eos": True}
    body |= {"on_member_failure": policy, "member_timeout_ms": 300}
    with Engine(replicas) as engine:
        wait_until(lambda: len(engine.coordinator.models()) == 3, "replicas")
        stuck = mock.patch.object(MemberRow, "due", property(lambda row: row.ready and row.prefilling))
        death = threading.Timer(0.5, stuck.start)
        with TestClient(make_api(Service(served, engine.coordinator))) as api:
            death.start()
            lines = api.post("/v1/completions", json=body).text.strip().split("\n\n")
        death.join()
        stuck.stop()
    if policy == "fail":
        assert lines[-1].startswith("event: error\n")
        assert "member 'member' of the ensemble took too long" in lines[-1]
        return
    members = json.loads(lines[-2].partition("data: ")[2])["choices"][0]["ensemble"]["members"]
    assert [member["answered"] for member in members] == [True, False]
    assert [member["weight"] for member in members] == [1, 0]
    assert members[1]["tokens"] < members[0]["tokens"] == 30
