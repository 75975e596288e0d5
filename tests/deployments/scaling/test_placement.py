"""What the status says of replicas, over fakes of what Serve's controller and Ray's head know."""

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated import common_pb2
from ray.serve.exceptions import RayServeException

from deployments.replicas.coordinator import death_reason
from deployments.scaling import placement
from deployments.scaling.placement import ClusterState, Placement, Placements, Restart, placement_of

ActorDeathCause: Any = vars(common_pb2)["ActorDeathCause"]
RUNNING, PLACED = {"state": "RUNNING", "node_id": "a"}, {"state": "STARTING", "node_id": "a"}
UNKNOWN, STOPPING = {"state": "STARTING"}, {"state": "STOPPING", "node_id": "a"}  # Serve does not know where it is yet
NEEDS = {"GPU": 0.5, "target": 1.0}
SLOW = "Deployment 'Target-t' in application 'consort' has 1 replicas that have taken more than 30s to be scheduled."


def details(wanted: int, *replicas: dict[str, Any], status: str = "UPDATING", message: str = "") -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "target_num_replicas": wanted,
        "required_resources": {"CPU": 0, "GPU": 0.5, "target": 1},
        "replicas": replicas,
    }


FULL = ClusterState([{"GPU": 0.25, "target": 1}], [(NEEDS, 2), ({"CPU": 1.0}, 9)], {"Target-t": "importing torch"})
SPREAD = ClusterState([{"GPU": 0.5}, {"target": 1}], [(NEEDS, 1)])
EMPTY = ClusterState([{"GPU": 1, "target": 4}])


@pytest.mark.parametrize(
    ("given", "state", "expected"),
    [
        (details(1, RUNNING, status="HEALTHY"), EMPTY, Placement(1, 1)),
        (details(0, STOPPING), EMPTY, Placement(0, 0)),
        (details(1, RUNNING, RUNNING), EMPTY, Placement(1, 2)),
        (details(2, RUNNING, PLACED), EMPTY, Placement(2, 1, 1, 0, "1 starting: loading")),
        (details(2, RUNNING, UNKNOWN), EMPTY, Placement(2, 1, 1, 0, "1 starting: loading")),
        (details(2, RUNNING), EMPTY, Placement(2, 1, 0, 0, "not started yet")),
        (
            details(4, RUNNING, UNKNOWN, UNKNOWN, PLACED, message=SLOW),
            FULL,
            Placement(
                *(4, 1, 1, 2),
                "2 can't be placed: each needs 0.5 GPU and 1 target, and the cluster has 0.25 GPU free; "
                "1 starting: importing torch",
            ),
        ),
        (
            details(2, RUNNING, UNKNOWN),
            SPREAD,
            Placement(
                *(2, 1, 0, 1),
                "1 can't be placed: each needs 0.5 GPU and 1 target on one node, and none has that free",
            ),
        ),
        (
            details(1, UNKNOWN, status="DEPLOY_FAILED", message="Traceback:\n  x\nConfigError: no tokenizer\n"),
            EMPTY,
            Placement(1, 0, 1, 0, "ConfigError: no tokenizer"),
        ),
    ],
)
def test_wanted_running_and_why_not_more(given: dict[str, Any], state: ClusterState, expected: Placement) -> None:
    assert placement_of("Target-t", given, state) == expected


def test_the_last_restart_stays_when_all_are_up() -> None:
    died = Restart(7.0, "its node died")
    state = ClusterState(restarts={"Target-t": died})
    assert placement_of("Target-t", details(1, RUNNING, status="HEALTHY"), state) == Placement(1, 1, last_restart=died)


def test_only_deaths_that_nobody_wanted_have_a_reason() -> None:
    def reason(number: int, message: str = "") -> str:
        return death_reason(ActorDeathCause(actor_died_error_context={"reason": number, "error_message": message}))

    known = type(ActorDeathCause().actor_died_error_context)
    detail = (
        "The actor died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits. End of file."
    )
    assert reason(known.WORKER_DIED, detail) == "its process died: Worker unexpectedly exits"
    assert reason(known.WORKER_DIED) == "its process died: Ray does not say why"
    assert reason(known.NODE_DIED) == "its node died"
    assert reason(known.RAY_KILL, "The actor is dead because it was killed by `ray.kill`.") == ""
    assert death_reason(ActorDeathCause(oom_context={"error_message": "x"})) == "its node ran out of memory"
    assert death_reason(ActorDeathCause()) == ""


def placements(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], read: Any, timeout_s: float = 0.05
) -> Placements:
    """Over a controller that answers at once. read: what Ray's head says of deployments."""

    async def answer() -> dict[str, Any]:
        return {"applications": {"consort": {"deployments": {"Target-t": given}}}}

    controller = SimpleNamespace(get_serve_instance_details=SimpleNamespace(remote=answer))
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: SimpleNamespace(_controller=controller))
    monkeypatch.setattr(placement, "_TIMEOUT_S", timeout_s)
    return Placements("consort", {"t": "Target-t"}, read)


def test_the_first_answer_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = placements(monkeypatch, details(2, RUNNING, UNKNOWN), lambda deployments: FULL, timeout_s=60)
    asked = asyncio.run(ask())
    assert asked["t"].unplaceable == 1
    assert "each needs 0.5 GPU and 1 target, and the cluster has 0.25 GPU free" in str(asked["t"].reason)


def test_a_head_that_does_not_answer_is_not_waited_for_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    back, calls = threading.Event(), list[Sequence[str]]()

    def read(deployments: Sequence[str]) -> ClusterState:
        calls.append(deployments)
        back.wait()
        return FULL

    async def ask() -> list[int]:
        asking = placements(monkeypatch, details(2, RUNNING, UNKNOWN), read)
        seen = [(await asking())["t"].unplaceable for _ in range(3)]
        back.set()
        ends_at_s = time.monotonic() + 60
        while not seen[-1] and time.monotonic() < ends_at_s:
            seen.append((await asking())["t"].unplaceable)
        return seen

    seen = asyncio.run(ask())
    assert (seen[:3], seen[-1]) == ([0, 0, 0], 1)
    assert calls[0] == ["Target-t"]
    assert len(calls) <= len(seen) - 2  # the first three asked once


def test_without_a_controller_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RayServeException("There is no Serve instance running on this Ray cluster.")

    monkeypatch.setattr("ray.serve.context._get_global_client", fail)
    assert asyncio.run(Placements("consort", {"m": "Target-m"}, lambda deployments: EMPTY)()) == {}
