"""The Host header, by which DNS rebinding is kept out."""

import pytest
from fastapi.testclient import TestClient

from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator


@pytest.fixture
def client(endpoints: dict[str, ServedEndpoint], coordinator: FakeCoordinator) -> TestClient:
    service = Service(endpoints, coordinator)  # type: ignore[arg-type]
    return TestClient(make_api(service, allowed_hosts=["localhost", "[::1]"]))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "[::1]", "[::1]:8000"])
def test_its_own_names_are_answered_with_any_port(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "[::2]:8000", ""])
@pytest.mark.parametrize("path", ["/health", "/", "/v1/models"])
def test_other_names_are_refused(client: TestClient, host: str, path: str) -> None:
    reply = client.get(path, headers={"Host": host})
    assert reply.status_code == 421
    assert reply.json()["error"]["code"] == "wrong_host"
    assert "http.allowed_hosts" in reply.json()["error"]["message"]
