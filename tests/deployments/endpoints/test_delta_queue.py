"""Deltas that come while a stream waits leave together; first and last ones don't wait."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from actors.coordinator.request import Delta, Statistics
from decoding.errors import ConsortError
from deployments.endpoints.delta_queue import DeltaQueue, StreamPace

LONG_S = 60.0  # a batch that waits so long makes a test fail


def delta(text: str = "a", **more: object) -> Delta:
    return Delta(text, [1], Statistics(), **more)  # type: ignore[arg-type]


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LONG_S / 2):
            await test()

    asyncio.run(run())


def paced(most_s: float) -> DeltaQueue:
    pace = StreamPace(most_s)
    pace.streams = 1_000_000
    return DeltaQueue(pace)


def test_the_interval_grows_with_the_number_of_streams_up_to_its_limit() -> None:
    pace = StreamPace(0.1)
    intervals = []
    for pace.streams in (0, 1, 10, 100):
        intervals.append(pace.interval_s)
    assert intervals == [0, 0.005, pytest.approx(0.05), 0.1]
    none = StreamPace()
    none.streams = 100
    assert none.interval_s == 0


def test_what_comes_meanwhile_leaves_together() -> None:
    async def test() -> None:
        queue = paced(0.5)
        queue.put(0, delta("a"))
        assert [each.text for _, each in await queue.batch()] == ["a"]
        queue.put(0, delta("b"))
        next_batch = asyncio.create_task(queue.batch())
        await asyncio.sleep(0)
        assert not next_batch.done()
        queue.put(1, delta("c"))
        assert [(index, each.text) for index, each in await next_batch] == [(0, "b"), (1, "c")]

    in_loop(test)


def test_a_delta_after_the_interval_leaves_at_once() -> None:
    async def test() -> None:
        queue = paced(1.0)
        queue.put(0, delta("a"))
        await queue.batch()
        queue.put(0, delta("b"))
        await asyncio.sleep(1.1)
        waiting = asyncio.create_task(queue.batch())
        queue.put(0, delta("c"))
        await asyncio.sleep(0)
        assert waiting.done()  # and not after twice the interval
        assert len(await waiting) == 2

    in_loop(test)


@pytest.mark.parametrize("last", [delta("z", finish="stop"), delta("", error=ConsortError("lost"))])
def test_the_last_delta_does_not_wait_and_what_came_before_leaves_with_it(last: Delta) -> None:
    async def test() -> None:
        queue = paced(LONG_S)
        queue.put(0, delta("a"))
        await queue.batch()
        queue.put(0, delta("b"))
        queue.put(0, last)
        assert [each for _, each in await queue.batch()] == [delta("b"), last]

    in_loop(test)


def test_other_answers_wait_again_after_the_last_delta_of_one() -> None:
    async def test() -> None:
        queue = paced(LONG_S)
        queue.put(0, delta("a", finish="stop"))
        await queue.batch()
        queue.put(1, delta("b"))
        waiting = asyncio.create_task(queue.batch())
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.put(1, delta("c", finish="stop"))
        assert len(await waiting) == 2

    in_loop(test)


def test_without_a_pace_nothing_waits() -> None:
    async def test() -> None:
        queue = DeltaQueue()
        for _ in range(3):
            queue.put(0, delta())
            assert len(await queue.batch()) == 1

    in_loop(test)
