"""Discovery against scripted deployments."""

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from actors.wire.messages import PROTOCOL, ReplicaAddress
from decoding.errors import UnavailableError
from deployments.replicas import discovery as discovery_module
from deployments.replicas.discovery import AddressQuery, Discovery, ReplicaAddresses
from deployments.replicas.model_replica import ReplicaAnswer
from deployments.scaling.policy import Felt

A, B, C = ReplicaAddress("large-1", "large"), ReplicaAddress("small-1", "small"), ReplicaAddress("large-2", "large")


def answers(*script: ReplicaAddresses | Exception) -> Callable[[], Awaitable[ReplicaAddresses]]:
    """A deployment that answers so, one after the other."""
    rest = iter(script)

    async def ask() -> ReplicaAddresses:
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
    updates = Recorder()
    ask = {
        "large": answers(ReplicaAddresses([A]), ReplicaAddresses([A])),
        "small": answers(UnavailableError(), ReplicaAddresses([B])),
    }
    discovery = Discovery(ask, updates)

    async def look() -> None:
        for model in ("large", "small", "large", "small"):
            await discovery.poll(model)

    asyncio.run(look())
    assert updates.addresses == [[A], [A], [A], [A, B]]
    assert updates.answered == [{A.name}, set(), {A.name}, {B.name}]


def test_all_models_are_looked_for_at_once() -> None:
    updates = Recorder()
    discovery = Discovery({"large": answers(ReplicaAddresses([A])), "small": answers(ReplicaAddresses([B]))}, updates)
    asyncio.run(discovery.poll_all())
    assert updates.addresses[-1] == [A, B]


def test_replicas_of_another_protocol_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """So a rolling update mixes versions only where they understand each other. It is logged once per replica."""
    updates = Recorder()
    newer = replace(C, protocol=PROTOCOL + 1)
    answer = ReplicaAddresses([A, newer])
    discovery = Discovery({"large": answers(answer, answer, ReplicaAddresses([newer], complete=False))}, updates)

    async def look() -> None:
        for _ in range(3):
            await discovery.poll("large")

    with caplog.at_level(logging.WARNING):
        asyncio.run(look())
    assert updates.addresses == [[A], [A], [A]]
    assert updates.answered == [{A.name}, {A.name}, set()]
    assert len(caplog.records) == 1


def test_an_address_keeps_its_protocol_on_the_way_through_ray() -> None:
    newer = replace(A, protocol=PROTOCOL + 1)
    assert pickle.loads(pickle.dumps(newer)) == newer


def test_slow_replicas_stay_and_dead_ones_go() -> None:
    updates = Recorder()
    script: list[ReplicaAddresses | Exception] = [
        ReplicaAddresses([A]),
        TimeoutError(),
        ReplicaAddresses([C], complete=False),
        ReplicaAddresses([C]),
    ]
    script.append(UnavailableError())
    discovery = Discovery({"large": answers(*script)}, updates)

    async def look() -> None:
        for _ in script:
            await discovery.poll("large")

    asyncio.run(look())
    assert updates.addresses == [[A], [A], [C, A], [C], []]
    assert updates.answered == [{A.name}, set(), {C.name}, {C.name}, set()]


def test_a_model_that_is_starting_holds_up_no_other() -> None:
    async def never() -> ReplicaAddresses:
        await asyncio.Event().wait()
        raise AssertionError

    async def first_found() -> list[ReplicaAddress]:
        updates: asyncio.Queue[list[ReplicaAddress]] = asyncio.Queue()
        ask = {"small": never, "large": answers(ReplicaAddresses([A]))}
        discovery = Discovery(ask, lambda addresses, answered: updates.put_nowait(addresses))
        running = asyncio.create_task(discovery.run())
        try:
            return await updates.get()
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

    asyncio.run(AddressQuery(broadcasting(fetch, asked), "coordinator-0", lambda: 166, wakes=False)())
    assert asked == [("address", "coordinator-0", 166, Felt())]


def test_a_coordinator_hears_from_replicas_how_many_there_are() -> None:
    async def fetch() -> list[Any]:
        return [SimpleNamespace(get_async=answers_with(count)) for count in (3, 1)]

    def answers_with(count: int) -> Any:
        async def get() -> ReplicaAnswer:
            return ReplicaAnswer(A, count)

        return get

    ask = AddressQuery(broadcasting(fetch), "coordinator-0", lambda: 0, wakes=False)
    assert ask.coordinators == 1
    assert asyncio.run(ask()).addresses == [A, A]
    assert ask.coordinators == 3


def test_a_coordinator_that_stands_by_is_not_counted() -> None:
    """Else the one that serves would leave half of the slots to it."""
    asked: list[Any] = []

    async def fetch() -> list[Any]:
        return [SimpleNamespace(get_async=answer)]

    async def answer() -> ReplicaAnswer:
        return ReplicaAnswer(A, 0)

    ask = AddressQuery(broadcasting(fetch, asked), "b", lambda: 0, wakes=False, stands_by=lambda: True)
    assert asyncio.run(ask()).addresses == [A]
    assert asked == [("address", None, 0, Felt())]
    assert ask.coordinators == 1


def test_a_frozen_replica_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "_TIMEOUT_S", 0.1)

    async def sound() -> ReplicaAnswer:
        return ReplicaAnswer(A, 1)

    async def frozen() -> ReplicaAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    async def stuck() -> ReplicaAnswer:
        raise UnavailableError("the loop has been stuck for 30 s")

    async def ask(*replicas: Callable[[], Awaitable[ReplicaAnswer]]) -> ReplicaAddresses:
        async def fetch() -> list[Any]:
            return [SimpleNamespace(get_async=replica) for replica in replicas]

        return await AddressQuery(broadcasting(fetch), "coordinator-0", lambda: 0, wakes=False)()

    assert asyncio.run(ask(frozen, sound)) == ReplicaAddresses([A], complete=False)
    assert asyncio.run(ask(stuck, sound)) == ReplicaAddresses([A])


def test_a_deployment_without_replicas_is_unavailable() -> None:
    async def fetch() -> list[Any]:
        raise DeploymentUnavailableError(DeploymentID("Target-large", "consort"))

    with pytest.raises(UnavailableError, match="Target-large"):
        asyncio.run(AddressQuery(broadcasting(fetch), "coordinator-0", lambda: 0, wakes=False)())


def test_requests_for_a_model_without_replicas_call_for_one() -> None:
    """Serve's autoscaler sees a call that waits; it is made once, and taken back when nobody waits any more."""
    calls: list[str] = []
    held_back = [0]

    async def fetch() -> list[Any]:
        raise DeploymentUnavailableError(DeploymentID("Target-large", "consort"))

    def call(*_: object) -> Any:
        calls.append("made")
        return SimpleNamespace(cancel=lambda: calls.append("taken back"))

    handle = broadcasting(fetch)
    handle.address = SimpleNamespace(remote=call)
    ask = AddressQuery(handle, "coordinator-0", lambda: held_back[0], wakes=True)
    for waiting, expected in ((0, []), (5, ["made"]), (9, ["made"]), (0, ["made", "taken back"])):
        held_back[0] = waiting
        with pytest.raises(UnavailableError):
            asyncio.run(ask())
        assert calls == expected
