"""What Serve's controller says about a deployment's replicas, in one line; a server that says it is in tests/server."""

import asyncio
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from deployments.scaling.controller import Placement, placement_of, placements

RUNNING, LOADING = {"state": "RUNNING", "node_id": "a"}, {"state": "STARTING", "node_id": "a"}
UNPLACED, STOPPING = {"state": "STARTING"}, {"state": "STOPPING", "node_id": "a"}
SLOW = "Deployment 'Target-t' in application 'consort' has 1 replicas that have taken more than 30s to be scheduled."
NEEDS = "2 not placed: no node has 0.5 GPU, 1 target free"


def details(wanted: int, *replicas: dict[str, Any], status: str = "UPDATING", message: str = "") -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "target_num_replicas": wanted,
        "required_resources": {"CPU": 0, "GPU": 0.5, "target": 1},
        "replicas": replicas,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (details(1, RUNNING, status="HEALTHY"), Placement(1, 1)),
        (details(0, STOPPING), Placement(0, 0)),
        (details(1, RUNNING, RUNNING), Placement(1, 2)),
        (details(2, RUNNING, LOADING), Placement(2, 1, "1 loading")),
        (details(2, RUNNING), Placement(2, 1, "not started yet")),
        (details(4, RUNNING, UNPLACED, UNPLACED, LOADING, message=SLOW), Placement(4, 1, NEEDS)),
        (
            details(1, UNPLACED, status="DEPLOY_FAILED", message="Traceback:\n  x\nConfigError: no tokenizer\n"),
            Placement(1, 0, "ConfigError: no tokenizer"),
        ),
    ],
)
def test_wanted_running_and_why_not_more(given: dict[str, Any], expected: Placement) -> None:
    assert placement_of(given) == expected


def test_without_a_controller_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RayServeException("There is no Serve instance running on this Ray cluster.")

    monkeypatch.setattr("ray.serve.context._get_global_client", fail)
    assert asyncio.run(placements("consort", {"m": "Target-m"})) == {}
