"""Discovery against scripted deployments."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from actors.wire.addresses import ReplicaAddress
from decoding.errors import UnavailableError
from deployments import app
from deployments.discovery import Answers, Discovery

A, B, C = ReplicaAddress("large-1", "large"), ReplicaAddress("small-1", "small"), ReplicaAddress("large-2", "large")


def answers(*script: Answers | Exception) -> Callable[[], Awaitable[Answers]]:
    """A deployment that gives these answers in order."""
    rest = iter(script)

    async def ask() -> Answers:
        answer = next(rest)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


class Recorder:
    """Records the updates that a coordinator would get."""

    def __init__(self) -> None:
        self.addresses: list[list[ReplicaAddress]] = []
        self.answered: list[set[str]] = []

    def __call__(self, addresses: list[ReplicaAddress], answered: set[str]) -> None:
        self.addresses.append(addresses)
        self.answered.append(answered)


def test_every_look_reports_all_replicas_and_those_that_answered() -> None:
    recorder = Recorder()
    ask = {"large": answers(Answers([A]), Answers([A])), "small": answers(UnavailableError(), Answers([B]))}
    discovery = Discovery(ask, recorder)

    async def look() -> None:
        for model in ("large", "small", "large", "small"):
            await discovery.look(model)

    asyncio.run(look())
    assert recorder.addresses == [[A], [A], [A], [A, B]]
    assert recorder.answered == [{A.name}, set(), {A.name}, {B.name}]


def test_all_models_are_looked_for_at_once() -> None:
    recorder = Recorder()
    discovery = Discovery({"large": answers(Answers([A])), "small": answers(Answers([B]))}, recorder)
    asyncio.run(discovery.look_at_all())
    assert recorder.addresses[-1] == [A, B]


def test_slow_replicas_stay_and_dead_ones_go() -> None:
    recorder = Recorder()
    script: list[Answers | Exception] = [Answers([A]), TimeoutError(), Answers([C], complete=False), Answers([C])]
    script.append(UnavailableError())
    discovery = Discovery({"large": answers(*script)}, recorder)

    async def look() -> None:
        for _ in script:
            await discovery.look("large")

    asyncio.run(look())
    assert recorder.addresses == [[A], [A], [C, A], [C], []]
    assert recorder.answered == [{A.name}, set(), {C.name}, {C.name}, set()]


def test_a_model_that_is_starting_holds_up_no_other() -> None:
    async def never() -> Answers:
        await asyncio.Event().wait()
        raise AssertionError

    async def first_found() -> list[ReplicaAddress]:
        recorder: asyncio.Queue[list[ReplicaAddress]] = asyncio.Queue()
        ask = {"small": never, "large": answers(Answers([A]))}
        discovery = Discovery(ask, lambda addresses, answered: recorder.put_nowait(addresses))
        running = asyncio.create_task(discovery.run())
        try:
            return await recorder.get()
        finally:
            running.cancel()

    assert asyncio.run(first_found()) == [A]


def broadcasting(fetch: Callable[[], Awaitable[list[Any]]], asked: list[Any] | None = None) -> Any:
    """Handle of a deployment whose broadcasts call `fetch`. asked: collects the arguments."""

    def broadcast(*call: Any) -> Any:
        if asked is not None:
            asked.append(call)
        return SimpleNamespace(_fetch_replica_results_async=fetch)

    return SimpleNamespace(broadcast=broadcast)


def test_replicas_hear_what_waits_at_the_coordinator() -> None:
    """Serve's autoscaler asks replicas only, but requests that wait at coordinators are demand, too."""
    asked: list[Any] = []

    async def fetch() -> list[Any]:
        return []

    asyncio.run(app._addresses(broadcasting(fetch, asked), "coordinator-0", lambda: 166))
    assert asked == [("address", "coordinator-0", 166)]


def test_a_frozen_replica_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_ASK_TIMEOUT_S", 0.1)

    async def sound() -> ReplicaAddress:
        return A

    async def frozen() -> ReplicaAddress:
        await asyncio.Event().wait()
        raise AssertionError

    async def stuck() -> ReplicaAddress:
        raise UnavailableError("the loop has been stuck for 30 s")

    async def ask(*replicas: Callable[[], Awaitable[ReplicaAddress]]) -> Answers:
        async def fetch() -> list[Any]:
            return [SimpleNamespace(get_async=replica) for replica in replicas]

        return await app._addresses(broadcasting(fetch), "coordinator-0", lambda: 0)

    assert asyncio.run(ask(frozen, sound)) == Answers([A], complete=False)
    assert asyncio.run(ask(stuck, sound)) == Answers([A])


def test_a_deployment_without_replicas_is_unavailable() -> None:
    async def fetch() -> list[Any]:
        raise DeploymentUnavailableError(DeploymentID("Target-large", "consort"))

    with pytest.raises(UnavailableError, match="Target-large"):
        asyncio.run(app._addresses(broadcasting(fetch), "coordinator-0", lambda: 0))
