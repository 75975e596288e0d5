"""Only whole answers to deterministic requests are cached, within the bound."""

from dataclasses import replace
from typing import Any

from fastapi.testclient import TestClient

from actors.coordinator.request import Delta, Endpoint, Request, Statistics
from actors.wire.messages import MemberShare, MemberView, Token
from decoding.errors import UnavailableError
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.response_cache import ResponseCache
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator

ENDPOINT = Endpoint("e", "target", None, 0, decode=str)


def request(*prompt: int, seeded: bool = False, **params: Any) -> Request:
    return Request(ENDPOINT, prompt, SamplingParams(**{"max_tokens": 4, "temperature": 0} | params), seeded=seeded)


def answer(*tokens: int, **last: Any) -> list[Delta]:
    *first, second = map(Token, tokens)
    return [Delta("a", first, Statistics()), Delta("b", [second], Statistics(), **{"finish": "stop"} | last)]


def test_what_was_answered_is_found_again() -> None:
    cache = ResponseCache(100)
    cache.put(request(1, 2), answer(3, 4))
    assert cache.get(request(1, 2)) == tuple(answer(3, 4))
    assert cache.get(request(1, 3)) is None
    assert cache.get(request(1, 2, top_k=5)) is None
    assert cache.get(replace(request(1, 2), endpoint=replace(ENDPOINT, name="other"))) is None


def test_the_oldest_answers_go_first() -> None:
    cache = ResponseCache(12)
    for prompt in ((1, 2), (3, 4), (5, 6)):
        cache.put(request(*prompt), answer(7, 8))
    assert cache.get(request(1, 2)) is not None
    cache.put(request(9, 9), answer(7, 8))
    assert cache.get(request(3, 4)) is None
    assert len(cache) == 3
    cache.put(request(*range(20)), answer(1, 2))  # too large by itself
    assert len(cache) == 3


def test_what_is_reported_of_tokens_counts() -> None:
    """The bound is one of memory: a token with 20 log-probabilities takes 20 times as much as one without."""
    top = TokenLogprobs(3, -1.0, 1, tuple((token, -2.0) for token in range(20)))
    shares = tuple(MemberView(name, -1.0, True, 0.5) for name in ("a", "b"))
    likely, blended = Token(4, logprobs=top), Token(4, views=shares)
    others = [Delta("", [Token(5), Token(6), Token(7)], Statistics())]
    cache = ResponseCache(1000)
    kinds: list[dict[str, Any]] = [
        {},
        {"tokens": [likely]},
        {"prompt_logprobs": [top], "tokens": [blended]},
        {"others": others},
    ]
    for index, more in enumerate(kinds):
        before = cache.tokens
        first, last = answer(3, 4)
        cache.put(request(index, 2), [first, replace(last, **more)])
        assert cache.tokens - before == 4 + (0, 20, 20 + 2, 3)[index]


def test_putting_an_answer_twice_counts_it_once() -> None:
    cache = ResponseCache(8)
    for _ in range(5):
        cache.put(request(1, 2), answer(3, 4))
    cache.put(request(3, 4), answer(3, 4))
    assert len(cache) == 2


def test_only_determined_answers_are_held() -> None:
    cache = ResponseCache(10)
    assert cache.can_hold(request(1, seeded=False))
    assert cache.can_hold(request(1, temperature=1, seeded=True))
    assert not cache.can_hold(request(1, temperature=1, seeded=False))
    assert not cache.can_hold(request(1, temperature=1, verification="rejection", seeded=True))
    assert not cache.can_hold(request(1, max_time_s=1.0, seeded=True))
    assert not ResponseCache(0).can_hold(request(1, seeded=True))


def test_broken_answers_are_not_kept() -> None:
    cache = ResponseCache(100)
    cache.put(request(1), answer(2, 3, finish=None, error=UnavailableError("gone")))
    cache.put(request(1), answer(2, 3, members=[MemberShare("a", 1, 2, 1, 0), MemberShare("b", 0, 1, 1, 0.1)]))
    assert len(cache) == 0


def test_a_request_that_comes_again_is_answered_from_the_cache(
    endpoints: dict[str, ServedEndpoint], coordinator: FakeCoordinator
) -> None:
    body = {"model": "consort", "prompt": "import os", "max_tokens": 8, "temperature": 0}
    with TestClient(make_api(Service(endpoints, coordinator, cached_tokens=1000))) as client:  # type: ignore[arg-type]
        answers = [client.post("/v1/completions", json=body) for _ in range(2)]
        stream = client.post("/v1/completions", json=body | {"stream": True})
        drawn = client.post("/v1/completions", json=body | {"temperature": 1})
    assert [answer.headers["X-Consort-Cache"] for answer in (*answers, stream)] == ["miss", "hit", "hit"]
    assert "X-Consort-Cache" not in drawn.headers
    first, second = (answer.json()["choices"] for answer in answers)
    assert first == second
    assert stream.text.rstrip().endswith("[DONE]")
