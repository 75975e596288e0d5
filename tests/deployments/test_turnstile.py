"""Where nothing can be taken on, a request is refused before it is read."""

from fastapi.testclient import TestClient

from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.admission import Limits
from deployments.http.keys import ApiKey, KeyRing, digest_of
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator


def test_a_full_server_refuses_whatever_the_body_says(endpoints: dict[str, ServedEndpoint]) -> None:
    service = Service(endpoints, FakeCoordinator(), limits=Limits(max_requests=0))  # type: ignore[arg-type]
    client = TestClient(make_api(service))
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/consort/v1/completions"):
        reply = client.post(path, content=b"anything")
        assert reply.status_code == 429
        assert reply.headers["Retry-After"] == "1"
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert client.post("/tokenize", json={"model": "consort", "prompt": "x"}).status_code == 200


def test_where_answers_are_kept_the_body_is_read_first(endpoints: dict[str, ServedEndpoint]) -> None:
    service = Service(endpoints, FakeCoordinator(), limits=Limits(max_requests=0), cached_tokens=10)  # type: ignore[arg-type]
    assert TestClient(make_api(service)).post("/v1/completions", content=b"anything").status_code == 400


def test_a_keys_own_bound_holds(endpoints: dict[str, ServedEndpoint]) -> None:
    keys = KeyRing([ApiKey("bob", digest_of("b"), max_requests=0), ApiKey("eve", digest_of("e"))])
    client = TestClient(make_api(Service(endpoints, FakeCoordinator()), keys=keys))  # type: ignore[arg-type]
    body = {"model": "consort", "prompt": "x"}
    statuses = [
        client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {secret}"}).status_code
        for secret in ("b", "e", "x")
    ]
    assert statuses == [429, 200, 401]
