"""Who may ask, over a fake coordinator: keys, sizes, ids, access log, the Host header, pages of other origins."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from decoding.errors import ConfigError
from deployments.admission.bounds import Limits
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.configuration.config import ServerConfig, parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator

BODY = {"model": "consort", "prompt": "secret prompt", "max_tokens": 4}
SECRET = "s3cret-key"
AUTHORIZED = {"Authorization": f"Bearer {SECRET}"}
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
LOCAL = ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080"]
FOREIGN = ["https://evil.example", "http://localhost.evil.example", "http://127.0.0.1.evil.example:80", "null"]
ALLOWED = "access-control-allow-origin"


@pytest.fixture
def client(endpoints: dict[str, ServedEndpoint], coordinator: FakeCoordinator) -> Iterator[TestClient]:
    """A server with two keys and a small bound on bodies."""
    keys = KeyRing([ApiKey("alice", digest_of(SECRET)), ApiKey("bob", digest_of("other"), max_requests=1)])
    service = Service(endpoints, coordinator, limits=Limits(8))  # type: ignore[arg-type]
    with TestClient(make_api(service, keys=keys, max_body_bytes=1000)) as client:
        yield client


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "Basic " + SECRET, SECRET, "Bearer é"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/docs", "/metrics", "/v1/status", "/nowhere"])
def test_without_a_key_only_health_readiness_and_page_answer(client: TestClient, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    reply = client.get(path, headers=headers)  # type: ignore[arg-type]
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    for open_path in ("/health", "/ready", "/"):
        assert client.get(open_path, headers=headers).status_code == 200  # type: ignore[arg-type]


def test_a_key_opens_everything(client: TestClient) -> None:
    assert client.post("/v1/completions", json=BODY, headers=AUTHORIZED).status_code == 200
    assert client.get("/v1/models", headers=AUTHORIZED).status_code == 200


def test_a_keys_bounds_apply(client: TestClient) -> None:
    body = {**BODY, "prompt": ["a", "b"]}
    refused = client.post("/v1/completions", json=body, headers={"Authorization": "Bearer other"})
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) >= 1
    assert client.post("/v1/completions", json=body, headers=AUTHORIZED).status_code == 200


def test_large_bodies_are_refused_announced_or_not(client: TestClient) -> None:
    large = json.dumps({**BODY, "prompt": "x" * 2000}).encode()
    headers = {**AUTHORIZED, "Content-Type": "application/json"}
    for content in (large, iter([large[:900], large[900:]])):
        reply = client.post("/v1/completions", content=content, headers=headers)
        assert reply.status_code == 413, reply.text
        assert "larger than 1000 bytes" in reply.json()["error"]["message"]


def test_ids_are_given_back(client: TestClient) -> None:
    assert client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    drawn = {client.get("/health").headers["X-Request-Id"] for _ in range(2)}
    assert len(drawn) == 2
    assert client.get("/health", headers={"X-Request-Id": "a b"}).headers["X-Request-Id"].startswith("req_")
    assert client.get("/v1/models").headers["X-Request-Id"]


def test_the_log_has_ids_and_no_secrets(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        client.post("/v1/completions", json=BODY, headers={**AUTHORIZED, "X-Request-Id": "mine"})
        client.get("/v1/models", headers={"Authorization": "Bearer wrong-secret"})
    lines = [json.loads(record.message) for record in caplog.records if record.name == "consort.access"]
    assert [(line["path"], line["status"], line["key"]) for line in lines] == [
        ("/v1/completions", 200, "alice"),
        ("/v1/models", 401, None),
    ]
    assert lines[0]["request_id"] == "mine"
    for hidden in ("secret prompt", SECRET, "wrong-secret"):
        assert hidden not in caplog.text


CONFIG: dict[str, Any] = {"models": {"m": {"path": "org/m"}}, "endpoints": {"e": {"target": "m"}}}


def configured(keys: dict[str, Any], folder: Path) -> ServerConfig:
    return parse_config({**CONFIG, "http": {"api_keys": keys}}, folder=folder)


def test_keys_come_from_the_file_itself_the_environment_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALICES_KEY", "a")
    monkeypatch.setenv("CONSORT_API_KEY", "c")
    monkeypatch.setenv("SECRETS", str(tmp_path / "secrets"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "secrets").mkdir()
    for name in ("bob", "secrets/dan", "secrets/fay"):
        (tmp_path / name).write_text(f"{name[-3]}\n", encoding="utf-8")
    keys = {"alice": {"env": "ALICES_KEY"}, "bob": {"file": "bob", "max_requests": 3}, "eve": {"key": "eves-secret"}}
    keys |= {"dan": {"file": "$SECRETS/dan"}, "fay": {"file": "~/secrets/fay"}}
    config = configured(keys, tmp_path)
    ring = config.http.key_ring()
    keys_found = {secret: ring.find(f"Bearer {secret}") for secret in ("a", "b", "c", "d", "eves-secret", "f")}
    assert {secret: key.name for secret, key in keys_found.items() if key} == {
        "a": "alice",
        "b": "bob",
        "c": "environment",
        "d": "dan",
        "eves-secret": "eve",
        "f": "fay",
    }
    assert ring.find("Bearer x") is None
    assert "eves-secret" not in repr(config)


@pytest.mark.parametrize("secret", ["secret", "secret\n", " secret", "\tsecret \r\n"])
def test_white_space_around_a_secret_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("CONSORT_API_KEY", secret)
    (tmp_path / "file").write_text(secret.replace("secret", "files"), encoding="utf-8")
    keys = {"file": {"file": "file"}, "inline": {"key": secret.replace("secret", "inlines")}}
    ring = configured(keys, tmp_path).http.key_ring()
    keys_found = [ring.find(f"Bearer {sent}") for sent in ("secret", "files", "inlines")]
    assert [key.name for key in keys_found if key] == ["environment", "file", "inline"]


@pytest.mark.parametrize(("secret", "problem"), [("", "is empty"), (" \n", "is empty"), ("clé", "printable ASCII")])
def test_a_key_in_the_environment_counts_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str, problem: str
) -> None:
    monkeypatch.setenv("CONSORT_API_KEY", secret)
    with pytest.raises(ConfigError, match=f"^CONSORT_API_KEY: .*{problem}"):
        configured({}, tmp_path)


def test_the_environments_key_replaces_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSORT_API_KEY", "secret")
    with pytest.raises(ConfigError, match=r"http\.api_keys\.environment: another key has this name"):
        configured({"environment": {"key": "other"}}, tmp_path)


def test_a_digest_is_as_good_as_the_secret(tmp_path: Path) -> None:
    ring = configured({"a": {"sha256": digest_of(SECRET).hex()}}, tmp_path).http.key_ring()
    assert ring.find(f"Bearer {SECRET}") is not None
    assert ring.find(f"Bearer {digest_of(SECRET).hex()}") is None


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ({}, "http.api_keys.a.key: should be set"),
        ({"key": " "}, "http.api_keys.a.key: is empty"),
        ({"sha256": "123456"}, "http.api_keys.a.sha256: should match"),
        ({"key": "x", "env": "Y"}, "only one of them"),
        ({"env": "NOT_SET_ANYWHERE"}, "http.api_keys.a.env: the environment has no NOT_SET_ANYWHERE"),
        ({"file": "$NOT_SET/a"}, "http.api_keys.a.file: '$NOT_SET/a': the environment has no NOT_SET"),
        ({"file": "nowhere"}, "http.api_keys.a.file: there is no secret in 'nowhere'"),
        ({"key": 123456}, "http.api_keys.a.key: should be a valid string"),
        ("123456", "http.api_keys.a: "),
    ],
)
def test_a_key_that_can_not_be_is_refused_without_showing_it(tmp_path: Path, key: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured({"a": key}, tmp_path)
    assert problem in str(refused.value)
    assert "123456" not in str(refused.value)


@pytest.fixture
def named(endpoints: dict[str, ServedEndpoint], coordinator: FakeCoordinator) -> TestClient:
    service = Service(endpoints, coordinator)  # type: ignore[arg-type]
    return TestClient(make_api(service, allowed_hosts=["localhost", "[::1]"]))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "[::1]", "[::1]:8000"])
def test_its_own_names_are_answered_with_any_port(named: TestClient, host: str) -> None:
    assert named.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "[::2]:8000", ""])
@pytest.mark.parametrize("path", ["/health", "/", "/v1/models"])
def test_other_names_are_refused(named: TestClient, host: str, path: str) -> None:
    reply = named.get(path, headers={"Host": host})
    assert reply.status_code == 421
    assert reply.json()["error"]["code"] == "wrong_host"
    assert "http.allowed_hosts" in reply.json()["error"]["message"]


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
