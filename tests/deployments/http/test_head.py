"""Below an endpoint's own base URL its name may be left out."""

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from deployments.apis.errors import install_error_handlers
from deployments.http.head import BaseUrls, resolve_model


def serving(kinds: dict[str, str]) -> TestClient:
    api = FastAPI()
    api.add_middleware(BaseUrls, kinds=kinds)
    install_error_handlers(api)

    @api.get("/v1/which")
    async def which(request: Request, model: str = "") -> str:
        return resolve_model(model, request)

    return TestClient(api)


@pytest.fixture
def client() -> TestClient:
    return serving({"a": "speculative", "org/b": "ensemble", "c": "ensemble"})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/which?model=x", "x"),
        ("/a/v1/which", "a"),
        ("/a/v1/which?model=a", "a"),
        ("/org/b/v1/which", "org/b"),
        ("/speculative/v1/which", "a"),
        ("/ensemble/v1/which", "org/b"),
        ("/c/v1/which", "c"),
    ],
)
def test_the_endpoint_follows_from_the_url(client: TestClient, path: str, expected: str) -> None:
    assert client.get(path).json() == expected


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/which", 400),
        ("/v1/which?model=", 400),
        ("/a/v1/which?model=c", 400),
        ("/nobody/v1/which", 404),
        ("/a/which", 404),
        ("//v1/which", 404),
        ("/page" + "/v1/" * 8000 + "%0a", 404),  # 7 s of backtracking, once
    ],
)
def test_what_has_no_endpoint_is_refused(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == ("model" if status == 400 else None)


def test_the_only_endpoint_needs_no_name() -> None:
    client = serving({"a": "plain"})
    assert client.get("/v1/which").json() == client.get("/a/v1/which").json() == "a"
    assert client.get("/v1/which?model=b").json() == "b"


def test_an_endpoint_that_is_called_like_a_kind_has_the_url() -> None:
    client = serving({"x": "ensemble", "ensemble": "plain"})
    assert client.get("/ensemble/v1/which").json() == "ensemble"
