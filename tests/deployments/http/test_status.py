"""GET /v1/status over a fake coordinator with made-up replicas."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from msgspec import structs

from actors.coordinator.request import Statistics
from actors.wire.messages import AdaptationState, ReplicaAddress, Report
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import Surroundings, make_api
from deployments.monitoring.metrics import Metrics
from deployments.scaling.placement import Placement, Restart
from tests.deployments.fake_coordinator import FakeCoordinator

BODY = {"model": "consort", "prompt": "import os", "max_tokens": 12}


def test_totals_are_those_of_the_answers(fake: TestClient) -> None:
    answers = [fake.post("/v1/completions", json={**BODY, "seed": seed}).json() for seed in range(3)]
    (endpoint,) = fake.get("/v1/status").json()["endpoints"]
    speculations = [answer["speculation"] for answer in answers]
    assert endpoint["totals"] == {
        "requests": 3,
        "tokens": 36,
        "steps": sum(speculation["steps"] for speculation in speculations),
        "drafted": sum(speculation["drafted"] for speculation in speculations),
        "accepted": sum(speculation["accepted"] for speculation in speculations),
        "missed": sum(speculation["steps"] for speculation in speculations),
        "hits": sum(speculation["steps"] for speculation in speculations),
        "prompt_tokens": sum(answer["usage"]["prompt_tokens"] for answer in answers),
        "cached": 0,
        "cache_hit_rate": 0.0,
    }


def test_the_rest_is_as_the_coordinator_knows_it(fake: TestClient) -> None:
    status = fake.get("/v1/status").json()
    assert status["status"] == "ready"
    assert status["uptime_s"] >= 0
    assert status["answer_cache"] is None
    assert status["requests"] == {"running": 0, "waiting": 0, "max": 8}
    assert [(replica["model"], replica["role"]) for replica in status["replicas"]] == [
        ("target", "target"),
        ("drafter", "drafter"),
    ]
    target, drafter = status["replicas"]
    assert (target["running"], target["waiting"], target["slots"], target["drafting"]) == (2, 1, 4, True)
    assert (drafter["running"], drafter["slots"], drafter["drafting"]) == (0, 0, None)
    assert target["speculation_gain"] is drafter["speculation_gain"] is None
    assert target["weights"] is drafter["weights"] is None


def test_replicas_that_are_wanted_and_run(
    fake: TestClient, endpoints: dict[str, ServedEndpoint], coordinator: Any
) -> None:
    async def placed() -> dict[str, Placement]:
        failed = Restart(1.5, "its node died")
        return {"target": Placement(2, 1, 0, 1, "1 can't be placed", failed), "drafter": Placement(1, 1)}

    assert fake.get("/v1/status").json()["models"] == []
    with TestClient(
        make_api(Service(endpoints, coordinator), surroundings=Surroundings(ask_placements=placed))
    ) as client:
        assert client.get("/v1/status").json()["models"] == [
            {"model": "target", "wanted": 2, "running": 1, "starting": 0, "unplaceable": 1}
            | {"reason": "1 can't be placed", "last_restart": {"at_s": 1.5, "reason": "its node died"}},
            {"model": "drafter", "wanted": 1, "running": 1, "starting": 0, "unplaceable": 0}
            | {"reason": None, "last_restart": None},
        ]
        lines = client.get("/metrics").text.splitlines()
    assert 'consort:replicas_wanted{model="target"} 2.0' in lines
    assert 'consort:replicas_running{model="target"} 1.0' in lines


def test_what_a_drafter_learned(fake: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Report(active=0, waiting=0, slots=4, request_ids=[])
    learned = structs.replace(load, adaptation=AdaptationState(2, 64, 0.5, 0.625))
    reports = [(ReplicaAddress(name, name), report) for name, report in (("target", load), ("drafter", learned))]
    monkeypatch.setattr(FakeCoordinator, "reports", lambda self: reports)
    target, drafter = fake.get("/v1/status").json()["replicas"]
    assert target["adaptation"] is None
    assert drafter["adaptation"] == {
        "updates": 2,
        "texts": 64,
        "acceptance_before": 0.5,
        "acceptance_after": 0.625,
    }


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_answers_to_head(fake: TestClient, path: str) -> None:
    response = fake.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_what_waits_and_what_each_proposer_did(fake: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [{"drafter": 0.25}, {"drafter": 0.75}]  # of two replicas
    load = Report(active=0, waiting=0, slots=4, request_ids=[])
    reports = [(ReplicaAddress("t", "target"), structs.replace(load, proposer_shares=share)) for share in shares]
    monkeypatch.setattr(FakeCoordinator, "reports", lambda self: reports)
    counted = Statistics(drafted=10, accepted=6, drafted_by={"drafter": 8, "corpus": 2}, accepted_by={"drafter": 6})
    monkeypatch.setattr(Metrics, "statistics", lambda self, endpoint: counted)
    (endpoint,) = fake.get("/v1/status").json()["endpoints"]
    assert (endpoint["running"], endpoint["waiting"], endpoint["predicted_wait_s"]) == (0, 0, 0.0)
    by_name = {proposer.pop("name"): proposer for proposer in endpoint["proposers"]}
    assert by_name["drafter"] == {"drafted": 8, "accepted": 6, "acceptance_rate": 0.75, "time_share": 0.5}
    assert by_name["corpus"] == {"drafted": 2, "accepted": 0, "acceptance_rate": 0.0, "time_share": 0.0}
