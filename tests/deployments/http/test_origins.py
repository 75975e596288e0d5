"""Web pages of other origins: which ones a browser lets use the server."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from decoding.errors import ConfigError
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.configuration.config import parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api

ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
LOCAL = ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080"]
FOREIGN = ["https://evil.example", "http://localhost.evil.example", "http://127.0.0.1.evil.example:80", "null"]
ALLOWED = "access-control-allow-origin"


@pytest.mark.parametrize("origin", LOCAL)
def test_pages_from_this_machine_may_use_the_server(fake: TestClient, origin: str) -> None:
    preflight = fake.options("/v1/chat/completions", headers={"Origin": origin, **ASKED})
    assert (preflight.status_code, preflight.headers[ALLOWED]) == (200, origin)
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = fake.get("/v1/models", headers={"Origin": origin})
    assert answer.headers[ALLOWED] == origin
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", FOREIGN)
def test_other_pages_may_not(fake: TestClient, origin: str) -> None:
    assert fake.options("/v1/chat/completions", headers={"Origin": origin, **ASKED}).status_code == 400
    assert ALLOWED not in fake.get("/v1/models", headers={"Origin": origin}).headers


def test_configured_pages_may_and_need_a_key(endpoints: dict[str, ServedEndpoint], coordinator: Any) -> None:
    origin, keys = "https://chat.example.org", KeyRing([ApiKey("alice", digest_of("secret"))])
    with TestClient(make_api(Service(endpoints, coordinator), keys=keys, cors_origins=[origin])) as client:
        assert client.options("/v1/models", headers={"Origin": origin, **ASKED}).status_code == 200
        assert client.options("/v1/models", headers={"Origin": LOCAL[0], **ASKED}).status_code == 400
        refused = client.get("/v1/models", headers={"Origin": origin})
        assert (refused.status_code, refused.headers[ALLOWED]) == (401, origin)  # the page can read why
    with TestClient(make_api(Service(endpoints, coordinator), cors_origins=["*"])) as client:
        assert client.get("/v1/models", headers={"Origin": FOREIGN[0]}).headers[ALLOWED] == "*"


@pytest.mark.parametrize("origin", ["chat.example.org", "https://*.example.org", "https://example.org/"])
def test_an_origin_without_scheme_or_with_a_path_is_refused(origin: str) -> None:
    path = str(ROOT / "models" / "target")
    config = {"models": {"a": {"path": path}}, "endpoints": {"e": {"target": "a"}}, "http": {"cors_origins": [origin]}}
    with pytest.raises(ConfigError, match=r"http\.cors_origins\.0: should match"):
        parse_config(config, folder=ROOT)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_answers_to_head(fake: TestClient, path: str) -> None:
    response = fake.head(path)
    assert (response.status_code, response.content) == (200, b"")
