"""Endpoints whose models have no replica until requests wait for one."""

from collections.abc import Callable, Iterator

import pytest
from fastapi.testclient import TestClient

from actors.coordinator.request import Delta, Request
from actors.wire.messages import ReplicaAddress, Report
from deployments.configuration.config import load_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator


class Idle(FakeCoordinator):
    """Has no replica, and remembers how many requests waited for a model when one was submitted for it."""

    count_unserved: Callable[[str], int]

    def __init__(self) -> None:
        super().__init__()
        self.ready = set()
        self.waited: dict[str, int] = {}

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        model = request.endpoint.target
        self.waited[model] = self.count_unserved(model)
        super().submit(request, sink)

    def reports(self) -> list[tuple[ReplicaAddress, Report | None]]:
        return []


@pytest.fixture
def coordinator() -> Idle:
    return Idle()


@pytest.fixture
def api(coordinator: Idle) -> Iterator[TestClient]:
    config = load_config(ROOT / "deployments" / "ensemble.yaml")
    service = Service(load_endpoints(config), coordinator, on_demand=config.models)  # type: ignore[arg-type]
    coordinator.count_unserved = service.admission.count_unserved
    with TestClient(make_api(service)) as client:
        yield client


def test_the_members_of_a_strategy_are_woken(api: TestClient, coordinator: Idle) -> None:
    answer = api.post("/v1/completions", json={"model": "best-of", "prompt": "import os", "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    members = api.get("/v1/models/best-of").json()["members"]
    assert coordinator.waited.keys() == set(members)
    assert all(coordinator.waited.values())


def test_an_idle_server_is_ready(api: TestClient) -> None:
    assert api.get("/v1/status").json()["status"] == "ready"
    assert all(card["ready"] for card in api.get("/v1/models").json()["data"])
    assert api.get("/v1/models/best-of").json()["ready"] is True
