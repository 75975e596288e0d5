"""Responses that are kept, continued, read and deleted by the official client, over a fake coordinator."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from starlette.types import Message as AsgiMessage

from actors.coordinator.request import Delta, Request
from actors.replica.in_process import Engine
from decoding.errors import UnavailableError
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.fields.conversation import Conversation, Message
from deployments.http.routes import make_api
from deployments.storage.store import ResponseStore
from engine.model.page_allocator import PAGE_SIZE
from tests.deployments.fake_coordinator import FakeCoordinator, answer
from tests.deployments.scripted import TOOLS, Scripted

ASKED: dict[str, Any] = {"model": "consort", "max_output_tokens": 12, "extra_body": {"seed": 1}}
KEYS = KeyRing([ApiKey("eve", digest_of("e")), ApiKey("bob", digest_of("b"))])


@pytest.fixture
def store() -> ResponseStore:
    return ResponseStore("memory", ttl_s=60, max_bytes=2**20)


@pytest.fixture
def http(endpoints: dict[str, ServedEndpoint], coordinator: Any, store: ResponseStore) -> Iterator[TestClient]:
    with TestClient(make_api(Service(endpoints, coordinator, store=store), keys=KEYS)) as client:
        yield client


def client_of(http: Any, secret: str) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key=secret, http_client=http, max_retries=0)


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    return client_of(http, "e")


def prompt_of(http: TestClient, coordinator: FakeCoordinator, *turns: tuple[str, str]) -> Any:
    """Return the prompt of a chat with these messages."""
    messages = [{"role": role, "content": text} for role, text in turns]
    body = {"model": "consort", "messages": messages, "max_tokens": 1}
    http.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer e"}).raise_for_status()
    return coordinator.requests[-1].prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_without_its_earlier_instructions(
    client: openai.OpenAI, http: TestClient, coordinator: FakeCoordinator, stream: bool
) -> None:
    def ask(**fields: Any) -> Any:
        if not stream:
            return client.responses.create(**ASKED, **fields)
        events: Any = list(client.responses.create(**ASKED, stream=True, **fields))
        return events[-1].response

    first = ask(input="hi", instructions="Be kind.", metadata={"a": "b"})
    second = ask(input=[{"role": "user", "content": "and?"}], previous_response_id=first.id, instructions="Be brief.")
    third = ask(input="so?", previous_response_id=second.id)
    prompt = coordinator.requests[-1].prompt
    said = [("user", "hi"), ("assistant", first.output_text), ("user", "and?"), ("assistant", second.output_text)]
    assert prompt == prompt_of(http, coordinator, *said, ("user", "so?"))
    assert coordinator.requests[1].prompt == prompt_of(http, coordinator, ("system", "Be brief."), *said[:3])
    assert (second.store, second.previous_response_id, third.previous_response_id) == (True, first.id, second.id)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert client.responses.retrieve(third.id).to_dict() == third.to_dict()
    assert first.metadata == {"a": "b"}


def test_input_items_come_in_pages_and_both_orders(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="hi", instructions="Be kind.")
    roles = ["user", "assistant", "user"]
    asked: Any = [{"role": role, "content": text} for role, text in zip(roles, "abc", strict=True)]
    second = client.responses.create(**ASKED, input=asked, previous_response_id=first.id)
    list_items = client.responses.input_items.list
    items: list[Any] = list(list_items(second.id, order="asc"))
    assert [item.content[0].text for item in items] == ["hi", first.output_text, "a", "b", "c"]
    assert [item.role for item in items] == ["user", "assistant", *roles]
    assert items[1].to_dict() == first.output[0].to_dict()
    assert all(item.id and item.status for item in items)
    newest_first = [item.id for item in items[::-1]]
    assert [item.id for item in list_items(second.id)] == newest_first
    assert [item.id for item in list_items(second.id, limit=2)] == newest_first  # the client asks for page after page
    page: Any = list_items(second.id, limit=2, after=newest_first[1])
    assert ([item.id for item in page.data], page.has_more) == (newest_first[2:4], True)
    assert (page.first_id, page.last_id) == (newest_first[2], newest_first[3])
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_1"}):
        with pytest.raises(openai.BadRequestError) as refused:
            list_items(second.id, **wrong)
        assert refused.value.param == next(iter(wrong))


def test_another_keys_response_is_none(http: TestClient, client: openai.OpenAI) -> None:
    own = client.responses.create(**ASKED, input="hi").id
    unknown = f"resp_{'0' * 24}"

    def refusals(secret: str, response_id: str) -> list[tuple[int, str]]:
        headers = {"Authorization": f"Bearer {secret}"}
        continued = {"model": "consort", "input": "x", "previous_response_id": response_id}
        replies = [
            http.get(f"/v1/responses/{response_id}", headers=headers),
            http.get(f"/v1/responses/{response_id}/input_items", headers=headers),
            http.delete(f"/v1/responses/{response_id}", headers=headers),
            http.post("/v1/responses", json=continued, headers=headers),
        ]
        return [(reply.status_code, reply.text.replace(response_id, "ID")) for reply in replies]

    assert refusals("b", own) == refusals("b", unknown)
    assert [status for status, _ in refusals("b", own)] == [404] * 4
    assert '"previous_response_not_found"' in refusals("b", own)[-1][1]
    assert [status for status, _ in refusals("x", own)] == [401] * 4
    assert client.responses.retrieve(own).id == own
    again = client.responses.create(**ASKED, input="hi").id
    assert re.fullmatch(r"resp_[0-9a-f]{24}", own)
    assert sum(a != b for a, b in zip(own, again, strict=True)) > 12  # 96 random bits


def test_what_is_deleted_can_no_longer_be_continued(client: openai.OpenAI, http: TestClient) -> None:
    first = client.responses.create(**ASKED, input="hi")
    second = client.responses.create(**ASKED, input="and?", previous_response_id=first.id)
    reply = http.delete(f"/v1/responses/{first.id}", headers={"Authorization": "Bearer e"})
    assert reply.json() == {"id": first.id, "object": "response", "deleted": True}
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(**ASKED, input="so?", previous_response_id=second.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_calls_of_tools_are_kept(with_tools: dict[str, ServedEndpoint], store: ResponseStore) -> None:
    coordinator: Any = Scripted()
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    with TestClient(make_api(Service(with_tools, coordinator, store=store))) as http:
        client = client_of(http, "none")
        first = client.responses.create(model="consort", input="Weather?", tools=tools)
        call: Any = first.output[1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = client.responses.create(model="consort", input=[result], previous_response_id=first.id, tools=tools)
        client.responses.create(model="consort", input="Thanks.", previous_response_id=second.id)
        *_, with_result, without_tools = coordinator.requests
        whole: Any = [{"role": "user", "content": "Weather?"}, *first.output, result]
        client.responses.create(model="consort", input=whole, tools=tools, store=False)
        assert coordinator.requests[-1].prompt == with_result.prompt
        whole += [*second.output, {"role": "user", "content": "Thanks."}]
        client.responses.create(model="consort", input=whole)
        assert coordinator.requests[-1].prompt == without_tools.prompt  # tools aren't inherited
        items: list[Any] = list(client.responses.input_items.list(second.id, order="asc"))
        kinds = ["message", "message", "function_call", "function_call_output"]
        assert [item.type for item in items] == kinds
        assert items[2].to_dict() == call.to_dict()
        assert (items[3].call_id, items[3].output[0].text) == (call.call_id, "sunny")


def test_items_can_be_named_instead_of_sent(with_tools: dict[str, ServedEndpoint], store: ResponseStore) -> None:
    """As the AI SDK does: all items of the conversation, and those of earlier outputs by their ids."""
    coordinator: Any = Scripted()
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    with TestClient(make_api(Service(with_tools, coordinator, store=store), keys=KEYS)) as http:
        client = client_of(http, "e")
        first = client.responses.create(model="consort", input="Weather?", tools=tools)
        call: Any = first.output[1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        asked = {"role": "user", "content": "Weather?"}
        named: Any = [asked, *({"type": "item_reference", "id": item.id} for item in first.output), result]
        whole: Any = [asked, *first.output, result]
        for items in (named, whole):
            client.responses.create(model="consort", input=items, tools=tools)
        assert coordinator.requests[-1].prompt == coordinator.requests[-2].prompt
        for secret, item in (("b", call.id), ("e", "msg_1"), ("e", call.id[:-1])):
            reference: Any = {"type": "item_reference", "id": item}
            with pytest.raises(openai.NotFoundError) as refused:
                client_of(http, secret).responses.create(model="consort", input=[reference])
            assert refused.value.param == "input"


def test_what_shall_not_be_kept_is_not(client: openai.OpenAI, store: ResponseStore) -> None:
    response: Any = client.responses.create(**ASKED, input="hi", store=False)
    assert (response.store, store.turns) == (False, 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_server_that_keeps_nothing_says_so(fake: TestClient) -> None:
    body = {"model": "consort", "input": "hi", "max_output_tokens": 2}
    reply = fake.post("/v1/responses", json={**body, "store": True})
    assert (reply.json()["store"], reply.headers["X-Consort-Ignored-Fields"]) == (False, "store")
    refused = fake.post("/v1/responses", json={**body, "previous_response_id": "resp_1"})
    assert refused.status_code == 400
    assert "responses.store" in refused.json()["error"]["message"]
    assert fake.get(f"/v1/responses/{reply.json()['id']}").status_code == 404
    named = fake.post("/v1/responses", json={**body, "input": [{"type": "item_reference", "id": "msg_1"}]})
    assert (named.status_code, named.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_outlives_its_store(
    http: TestClient, store: ResponseStore, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    headers, body = {"Authorization": "Bearer e"}, {"model": "consort", "input": "hi", "max_output_tokens": 2}
    first = http.post("/v1/responses", json=body, headers=headers).json()

    def fail(work: Callable[..., object]) -> None:
        raise UnavailableError("the store of responses can't be reached")

    monkeypatch.setattr(store._database, "transact", fail)
    reply = http.post("/v1/responses", json={**body, "stream": stream}, headers=headers)
    whole = json.loads(reply.text.split("data: ")[-1])["response"] if stream else reply.json()
    assert (reply.status_code, whole["status"], whole["store"]) == (200, "incomplete", False)
    assert "consort:responses_lost_total{" in (metrics := http.get("/metrics", headers=headers).text)
    assert re.search(r"^consort:responses_lost_total\S* 1.0$", metrics, re.MULTILINE)
    url = f"/v1/responses/{first['id']}"
    replies = [http.get(url, headers=headers), http.delete(url, headers=headers)]
    replies.append(http.post("/v1/responses", json={**body, "previous_response_id": first["id"]}, headers=headers))
    for refused in replies:
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert "Retry-After" in refused.headers


def test_a_turns_kv_pages_serve_the_next_turn(
    engine: Engine, endpoints: dict[str, ServedEndpoint], store: ResponseStore
) -> None:
    """The model is random, so its texts are hardly ever tokenized as they were written."""
    with TestClient(make_api(Service(endpoints, engine.coordinator, store=store))) as http:
        client = client_of(http, "none")
        previous, length = None, 0
        for text in ("Tell me about bread.", "And then?", "Why?"):
            response: Any = client.responses.create(
                model="consort", input=text, max_output_tokens=40, previous_response_id=previous, extra_body={"seed": 5}
            )
            assert response.usage.input_tokens_details.cached_tokens == (
                length and (length - 1) // PAGE_SIZE * PAGE_SIZE
            )
            previous, length = response.id, response.usage.total_tokens
        items: list[Any] = list(client.responses.input_items.list(response.id, order="asc"))
        as_text: Any = client.responses.create(
            model="consort", input=[item.to_dict() for item in items], max_output_tokens=1, store=False
        )
        assert as_text.usage.input_tokens_details.cached_tokens < response.usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize(
    ("lead", "answer"),
    [
        ([7, 8], [9, 10]),  # nothing that tokens can be told apart by
        ([5], []),
        ([5], [9, 9, 9]),  # another text
        ([5], [3000]),  # no token
    ],
)
def test_tokens_that_are_not_the_texts_are_not_taken(
    endpoints: dict[str, ServedEndpoint], lead: list[int], answer: list[int]
) -> None:
    encoder = endpoints["consort"].encoder
    said = [("user", "hi"), ("assistant", "Hello, you."), ("user", "and?")]
    messages = [Message.model_validate({"role": role, "content": text}) for role, text in said]
    plain = encoder.conversation(Conversation(messages))
    assert encoder.conversation(Conversation(messages, written=[(lead, answer)])) == plain


class Held(FakeCoordinator):
    """Sends all of an answer but its end."""

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        self.requests.append(request)
        for delta in answer(request)[:-1]:
            sink(delta)


@pytest.mark.parametrize(("ends", "kept"), [(True, 1), (False, 0)])
def test_a_stream_whose_client_leaves_is_kept_if_it_has_ended(
    endpoints: dict[str, ServedEndpoint], store: ResponseStore, ends: bool, kept: int
) -> None:
    coordinator: Any = FakeCoordinator() if ends else Held()
    body = json.dumps({"model": "consort", "input": "hi", "max_output_tokens": 12, "stream": True, "seed": 1}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    path = "/v1/responses"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("testserver", 80)}

    async def ask() -> None:
        app, has_left, messages = make_api(Service(endpoints, coordinator, store=store)), asyncio.Event(), [body]

        async def receive() -> AsgiMessage:
            if messages:
                return {"type": "http.request", "body": messages.pop()}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: AsgiMessage) -> None:
            text = message.get("body", b"")
            if b"event: response.incomplete" in text or (text and not ends):  # the client gets no more
                has_left.set()
                await asyncio.sleep(0.05)

        await app({**scope, "asgi": {"version": "3.0"}, "client": ("testclient", 1), "state": {}}, receive, send)

    asyncio.run(asyncio.wait_for(ask(), 10))
    assert store.turns == kept
    assert bool(coordinator.cancelled) == (not ends)
