"""Any combination of fields is answered, or refused with a 400 that names the field."""

from typing import Any

from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.fields.generation import GenerationRequest

numbers = st.one_of(st.integers(-3, 40), st.sampled_from([0, 1, 2, 2047, 2048, 10**12]), st.floats(-1, 3, width=16))
texts = st.sampled_from(["", "a", "é", "import os", "none", "auto", "{", "[a-z]+", 'start: "a"', "\n", "json"])
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
schemas = st.sampled_from([{}, {"type": "object"}, {"type": "integer"}, {"type": "nonsense"}, {"enum": []}])
structures = st.one_of(
    st.builds(lambda schema: {"json": schema}, schemas),
    st.builds(lambda text: {"regex": text}, texts),
    st.builds(lambda text: {"grammar": text}, texts),
    st.builds(lambda choice: {"choice": choice}, st.lists(texts, max_size=3)),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["text", "json_object", "json_schema", "x"])),
    st.builds(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}, schemas),
)
values = st.one_of(
    leaves,
    st.lists(leaves, max_size=3),
    st.dictionaries(st.one_of(texts, st.integers(-1, 2048).map(str)), leaves, max_size=2),
    structures,
)
_NOT_DRAWN = {"model", "prompt", "messages", "stream", "max_tokens"}


def bodies(model: type[GenerationRequest]) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted(set(model.model_fields) - _NOT_DRAWN)
    return st.dictionaries(st.sampled_from(names), values, max_size=5)


def check(fake: TestClient, path: str, body: dict[str, Any]) -> None:
    reply = fake.post(path, json=body)
    assert reply.status_code in (200, 400, 429), reply.text
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert error["param"], error
        assert len(error["message"]) < 500


SETTINGS = settings(
    max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SETTINGS
@given(fields=bodies(CompletionRequest), prompt=st.one_of(st.just("x"), values), stream=st.booleans())
def test_completions(fake: TestClient, fields: dict[str, Any], prompt: Any, stream: bool) -> None:
    check(
        fake,
        "/v1/completions",
        {"model": "consort", "prompt": prompt, "max_tokens": 5, "stream": stream, **fields},
    )


@SETTINGS
@given(fields=bodies(ChatRequest), content=st.one_of(st.just("x"), values), stream=st.booleans())
def test_chats(fake: TestClient, fields: dict[str, Any], content: Any, stream: bool) -> None:
    messages = [{"role": "user", "content": content}]
    body = {"model": "consort", "messages": messages, "max_tokens": 5, "stream": stream, **fields}
    check(fake, "/v1/chat/completions", body)
