"""Discovery against scripted deployments."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from actors.addresses import ReplicaAddress
from decoding.errors import UnavailableError
from deployments.discovery import Discovery

A, B = ReplicaAddress("large-1", "large"), ReplicaAddress("small-1", "small")


def answers(*script: list[ReplicaAddress] | Exception) -> Callable[[], Awaitable[Sequence[ReplicaAddress]]]:
    """A deployment that answers so, one after the other."""
    rest = iter(script)

    async def ask() -> Sequence[ReplicaAddress]:
        answer = next(rest)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


class Found:
    """What the coordinator would be told."""

    def __init__(self) -> None:
        self.addresses: list[list[ReplicaAddress]] = []
        self.answered: list[set[str]] = []

    def __call__(self, addresses: list[ReplicaAddress], answered: set[str]) -> None:
        self.addresses.append(addresses)
        self.answered.append(answered)


def test_every_look_reports_all_replicas_and_those_that_answered() -> None:
    found = Found()
    discovery = Discovery({"large": answers([A], [A]), "small": answers(UnavailableError(), [B])}, found)

    async def look() -> None:
        for model in ("large", "small", "large", "small"):
            await discovery.look(model)

    asyncio.run(look())
    assert found.addresses == [[A], [A], [A], [A, B]]
    assert found.answered == [{A.name}, set(), {A.name}, {B.name}]


def test_slow_replicas_stay_and_dead_ones_go() -> None:
    found = Found()
    discovery = Discovery({"large": answers([A], TimeoutError(), UnavailableError())}, found)

    async def look() -> None:
        for _ in range(3):
            await discovery.look("large")

    asyncio.run(look())
    assert found.addresses == [[A], [A], []]
    assert found.answered == [{A.name}, set(), set()]


def test_a_model_that_is_starting_holds_up_no_other() -> None:
    async def never() -> Sequence[ReplicaAddress]:
        await asyncio.Event().wait()
        raise AssertionError

    async def first_found() -> list[ReplicaAddress]:
        found: asyncio.Queue[list[ReplicaAddress]] = asyncio.Queue()
        ask = {"small": never, "large": answers([A])}
        discovery = Discovery(ask, lambda addresses, answered: found.put_nowait(addresses))
        running = asyncio.create_task(discovery.run())
        try:
            return await found.get()
        finally:
            running.cancel()

    assert asyncio.run(first_found()) == [A]
