"""Panels with a writer over HTTP: what members and writer read, who is counted, what is refused, who may fail."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
from fastapi.testclient import TestClient

from decoding.errors import ConfigError
from deployments.admission.bounds import Limits
from deployments.configuration.config import parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.conftest import tiny_runner
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from actors.replica.in_process import Engine

TEMPLATE = "{{ prompt }}\n{% for answer in answers %}{{ answer.model }}: {{ answer.text }}\n{% endfor %}Best:"
SAMPLED: dict[str, Any] = {"model": "panel", "max_tokens": 8, "temperature": 0.8, "seed": 5}
BODY: dict[str, Any] = {**SAMPLED, "prompt": "import os"}
CHAT: dict[str, Any] = {
    **SAMPLED,
    "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def document(**strategy: Any) -> dict[str, Any]:
    models = {"target": "target", "member": "member", "writer": "target"}
    panel: dict[str, Any] = {"members": ["target", "member"], "strategy": {"kind": "synthesize", **strategy}}
    return {
        "models": {name: {"path": str(ROOT / "models" / folder)} for name, folder in models.items()},
        "endpoints": {
            "panel": {**panel, "on_member_failure": "drop"},
            "strict": panel,
            "many": {**panel, "strategy": {**panel["strategy"], "candidates": 3}},
            "alone": {"target": "writer"},
            "second": {"target": "member"},
        },
    }


@pytest.fixture(scope="module")
def engine() -> "Iterator[Engine]":
    from actors.replica.in_process import Engine

    with Engine({name: ("target", tiny_runner(i)) for i, name in enumerate(["target", "member", "writer"])}) as engine:
        wait_until(lambda: len(engine.coordinator.models()) == 3, "replicas")
        yield engine


@pytest.fixture(scope="module")
def service(engine: "Engine") -> Service:
    config = parse_config(document(writer="writer", template=TEMPLATE), folder=ROOT)
    return Service(load_endpoints(config), engine.coordinator, limits=Limits(max_requests=64))


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[TestClient]:
    with TestClient(make_api(service)) as client:
        yield client


def post(api: TestClient, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer = api.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def read_by_writer(prompt: str, ensemble: dict[str, Any]) -> str:
    return jinja2.Template(TEMPLATE, trim_blocks=True).render(prompt=prompt, answers=ensemble["candidates"])


def test_the_writer_answers_what_the_template_writes(api: TestClient) -> None:
    whole = post(api, {**BODY, "logprobs": 1})
    (choice,) = whole["choices"]
    ensemble, prompt = choice["ensemble"], read_by_writer("import os", choice["ensemble"])
    alone = post(api, {**BODY, "model": "alone", "prompt": prompt, "logprobs": 1})
    assert (choice["text"], choice["logprobs"]) == (alone["choices"][0]["text"], alone["choices"][0]["logprobs"])
    assert ensemble["writer"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert (ensemble["strategy"], ensemble["writer"]["model"], ensemble["writer"]["tokens"]) == (
        "synthesize",
        "writer",
        8,
    )
    assert [member["tokens"] for member in ensemble["members"]] == [8, 8]
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["prompt_tokens"] == ensemble["members"][0]["prompt_tokens"]


def test_members_get_the_request_as_it_is(api: TestClient) -> None:
    candidates = post(api, {**BODY, "temperature": 0})["choices"][0]["ensemble"]["candidates"]
    second = post(api, {**BODY, "model": "second", "temperature": 0})
    assert [each["model"] for each in candidates] == ["target", "member"]
    assert candidates[1]["text"] == second["choices"][0]["text"].strip()


def test_a_chat_keeps_what_comes_before_the_question(api: TestClient) -> None:
    (choice,) = post(api, CHAT, "/v1/chat/completions")["choices"]
    asked = {"role": "user", "content": read_by_writer("Hi", choice["ensemble"])}
    alone = post(api, {**CHAT, "model": "alone", "messages": [CHAT["messages"][0], asked]}, "/v1/chat/completions")
    assert choice["message"]["content"] == alone["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body", "tool"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}, {"type": "function", "name": "f"}),
        ("/v1/messages", {"messages": CHAT["messages"][1:], "max_tokens": 4}, {"name": "f", "input_schema": {}}),
    ],
)
def test_other_apis(api: TestClient, path: str, body: dict[str, Any], tool: dict[str, Any]) -> None:
    body = {"model": "panel", "seed": 5, **body}
    whole = post(api, body, path)
    assert whole["usage"]["output_tokens"] == 12
    assert [len(whole["ensemble"][name]) for name in ("members", "candidates")] == [2, 2]
    refused = api.post(path, json={**body, "tools": [tool]})
    assert (refused.status_code, "tools: the model 'panel' writes" in refused.text) == (400, True)


def test_the_writers_tokens_stream(api: TestClient) -> None:
    with api.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines[:-1]]
    progress = [event["progress"] for event in events if "progress" in event]
    pieces = [event["choices"][0]["text"] for event in events if "progress" not in event]
    (choice,) = post(api, BODY)["choices"]
    assert "".join(pieces) == choice["text"]
    assert len(pieces) == 8
    assert {step["model"]: step["text"] for step in progress} == {
        each["model"]: each["text"] for each in choice["ensemble"]["candidates"]
    }
    assert events[-1]["choices"][0]["ensemble"]["candidates"] == choice["ensemble"]["candidates"]


def test_prompts_and_choices_have_panels_of_their_own(api: TestClient) -> None:
    both = post(api, {**BODY, "prompt": ["import os", "def f"], "n": 2})["choices"]
    texts = [[each["text"] for each in choice["ensemble"]["candidates"]] for choice in both]
    assert texts[0] != texts[1] != texts[2]
    assert both[0]["text"] == post(api, BODY)["choices"][0]["text"]
    many = post(api, {**BODY, "model": "many"})["choices"][0]["ensemble"]
    assert [(each["model"], each["index"]) for each in many["candidates"]] == [
        (model, index) for model in ("target", "member") for index in range(3)
    ]


def test_answers_have_equal_parts_of_the_writers_context(api: TestClient, service: Service) -> None:
    length = service.endpoint("panel").context_length
    ensemble = post(api, {**BODY, "max_tokens": length - 200})["choices"][0]["ensemble"]
    assert ensemble["writer"]["prompt_tokens"] + ensemble["writer"]["tokens"] <= length
    assert all(50 < member["tokens"] <= 100 for member in ensemble["members"])
    full = api.post("/v1/completions", json={**BODY, "max_tokens": length - 4})
    assert (full.status_code, full.json()["error"]["param"]) == (400, "max_tokens")
    assert "answers and its own" in full.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {**CHAT, "tools": [TOOL]}, "tools"),
        ("chat/completions", {**CHAT, "messages": [{"role": "assistant", "content": "Hi"}]}, "messages"),
        ("completions", {**BODY, "use_beam_search": True}, "use_beam_search"),
        ("completions", {**BODY, "echo": True}, "echo"),
        ("completions", {**BODY, "prompt_logprobs": 0}, "prompt_logprobs"),
        ("completions", {**BODY, "prompt": [7, 8]}, "prompt"),
        ("completions", {**BODY, "weights": [1, 2]}, "weights"),
        ("completions", {**BODY, "blend": {"kind": "vote"}}, "blend"),
        ("completions", {**BODY, "prompt_compression": {"rate": 0.5}}, "prompt_compression"),
    ],
)
def test_what_a_panel_can_not_do_is_refused(api: TestClient, path: str, body: dict[str, Any], field: str) -> None:
    refused = api.post(f"/v1/{path}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert "'panel'" in refused.json()["error"]["message"]


def test_tools_that_nobody_may_call_are_no_obstacle(api: TestClient) -> None:
    post(api, {**CHAT, "tools": [TOOL], "tool_choice": "none"}, "/v1/chat/completions")


def test_a_member_without_replica_is_dropped_and_a_writer_is_not() -> None:
    from actors.replica.in_process import Engine

    endpoints = load_endpoints(parse_config(document(writer="writer"), folder=ROOT))
    for present, statuses in (["target", "writer"], [200, 503]), (["target", "member"], [503, 503]):
        with Engine({name: ("target", tiny_runner(0)) for name in present}) as engine:
            wait_until(lambda engine=engine: len(engine.coordinator.models()) == 2, "replicas")  # type: ignore[misc]
            with TestClient(make_api(Service(endpoints, engine.coordinator))) as api:
                answers = [api.post("/v1/completions", json={**BODY, "model": name}) for name in ("panel", "strict")]
                cards = [api.get(f"/v1/models/{name}").json() for name in ("panel", "strict")]
        assert [answer.status_code for answer in answers] == statuses
        assert [card["ready"] for card in cards] == [status == 200 for status in statuses]
        if statuses[0] == 200:
            members = answers[0].json()["choices"][0]["ensemble"]["members"]
            assert [member["answered"] for member in members] == [True, False]


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ({"writer": "wirter"}, r"endpoints\.panel\.strategy\.writer: there is no model 'wirter'; .*'writer'"),
        ({"template": "{{ answers"}, r"endpoints\.panel\.strategy\.template: is no Jinja template"),
        ({"template": "{{ prompt }}"}, r"endpoints\.panel\.strategy\.template: does not show `answers`"),
        ({"template": "{{ answers }} {{ promt }}"}, r"'promt' is no variable of it; .*'prompt'"),
        ({"template": "{{ answers[0].txt }}"}, r"endpoints\.panel\.strategy\.template: .*has no attribute 'txt'"),
        ({"kind": "mbr", "writer": "writer"}, r"endpoints\.panel\.strategy\.writer: is for synthesize, not for mbr"),
    ],
)
def test_wrong_keys_are_named(strategy: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_endpoints(parse_config(document(**strategy), folder=ROOT))


def test_members_read_by_templates_and_tokens_of_their_own(tmp_path: Path) -> None:
    """A member with permuted tokens and another chat template answers in its own; the writer reads its text."""
    from actors.replica.in_process import Engine
    from engine.loading.settings import load_tokenizer
    from engine.model.runner import Runner
    from tests.support.permuted import permutation, permuted_model, permuted_tokenizer

    original = load_tokenizer(str(ROOT / "models" / "target"), None)
    prompt = original("# Be brief\n# Hi\n", add_special_tokens=False).input_ids
    tokenizer = permuted_tokenizer(original, permutation(2048))
    tokenizer.chat_template = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((ROOT / "models" / "target" / "config.json").read_text())
    config = parse_config(
        {
            "models": {"target": {"path": str(ROOT / "models" / "target")}, "other": {"path": str(tmp_path)}},
            "endpoints": {
                "panel": {"members": ["other"], "strategy": {"kind": "synthesize", "writer": "target"}},
                "alone": {"target": "target"},
            },
        },
        folder=ROOT,
    )
    model = permuted_model(tiny_runner(0).model, permutation(2048))
    replicas: dict[str, Any] = {
        "target": ("target", tiny_runner(0)),
        "other": ("target", Runner(model, slots=4, max_length=1024, max_query=256)),
    }
    with Engine(replicas) as engine:
        wait_until(lambda: len(engine.coordinator.models()) == 2, "replicas")
        with TestClient(make_api(Service(load_endpoints(config), engine.coordinator))) as api:
            greedy = {**CHAT, "temperature": 0, "logit_bias": {"7": 100}}
            ensemble = post(api, greedy, "/v1/chat/completions")["choices"][0]["ensemble"]
            alone = post(api, {**BODY, "model": "alone", "temperature": 0, "prompt": prompt})
    (candidate,) = ensemble["candidates"]
    assert candidate["text"] == alone["choices"][0]["text"].strip()
    assert ensemble["members"][0]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
