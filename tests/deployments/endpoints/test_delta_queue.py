"""Deltas that come while a stream waits leave together; first and last ones don't wait."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from actors.coordinator.request import Delta, Statistics
from actors.wire.messages import Token
from decoding.errors import ConsortError
from deployments.endpoints.delta_queue import DeltaBatch, DeltaQueue, StreamPace

TWO = 2  # streams, so that the interval is 5 ms


class Clock:
    """The time of an event loop, set by hand."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        asyncio.get_running_loop().time = lambda: self.now_s  # type: ignore[method-assign]

    async def advance(self, seconds: float) -> None:
        """Let time pass, and everything that waits for it run."""
        self.now_s += seconds
        for _ in range(3):
            await asyncio.sleep(0)


def delta(text: str = "a", **more: object) -> Delta:
    return Delta(text, [Token(1)], Statistics(), **more)  # type: ignore[arg-type]


def paced(streams: int = TWO) -> DeltaQueue:
    """Return the queue of one of so many streams."""
    pace = StreamPace(0.2)
    pace.streams = streams - 1  # that have begun
    return DeltaQueue(pace)


def texts(batch: DeltaBatch) -> list[tuple[int, str]]:
    return [(index, each.text) for index, each in batch]


def in_loop(test: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner() as runner:
        runner.run(test())


def test_the_interval_grows_with_the_number_of_other_streams_up_to_half_the_longest_time() -> None:
    pace = StreamPace(0.2)
    intervals = []
    for pace.streams in (0, 1, 2, 11, 100):
        intervals.append(pace.interval_s)
    assert intervals == [0, 0, 0.005, pytest.approx(0.05), 0.1]
    none = StreamPace()
    none.streams = 100
    assert none.interval_s == 0


def test_what_is_due_leaves_with_the_next_delta() -> None:
    async def test() -> None:
        clock, queue = Clock(), paced()
        queue.put(0, delta("a"))
        assert texts(await queue.batch()) == [(0, "a")]
        queue.put(0, delta("b"))
        batch = asyncio.create_task(queue.batch())
        await clock.advance(0.006)
        assert not batch.done()
        queue.put(0, delta("c"))
        await clock.advance(0.0)
        assert texts(batch.result()) == [(0, "b"), (0, "c")]

    in_loop(test)


def test_after_twice_the_interval_it_leaves_in_any_case() -> None:
    async def test() -> None:
        clock, queue = Clock(), paced()
        queue.put(0, delta("a"))
        await queue.batch()
        queue.put(0, delta("b"))
        batch = asyncio.create_task(queue.batch())
        await clock.advance(0.009)
        assert not batch.done()
        await clock.advance(0.002)
        assert texts(batch.result()) == [(0, "b")]

    in_loop(test)


def test_the_last_delta_does_not_wait_and_what_came_before_leaves_with_it() -> None:
    async def test() -> None:
        Clock()
        queue = paced(100)
        queue.put(0, delta("a"))
        await queue.batch()
        queue.put(0, delta("b"))
        queue.put(0, delta("z", finish="stop"))
        assert texts(await queue.batch()) == [(0, "b"), (0, "z")]

    in_loop(test)


def test_an_error_does_not_wait_and_is_raised_after_what_came_before() -> None:
    async def test() -> None:
        Clock()
        queue = paced(100)
        queue.put(0, delta("a"))
        await queue.batch()
        queue.put(0, delta("b"))
        queue.put(0, delta("", error=ConsortError("lost")))
        assert texts(await queue.batch()) == [(0, "b")]
        with pytest.raises(ConsortError, match="lost"):
            await queue.batch()

    in_loop(test)


def test_a_stream_counts_from_its_first_batch_until_it_is_closed() -> None:
    async def test() -> None:
        pace = StreamPace(0.2)
        queue, other = DeltaQueue(pace), DeltaQueue(pace)
        counts = [pace.streams]
        queue.put(0, delta())
        counts.append(pace.streams)
        for _ in range(2):
            queue.put(0, delta(finish="stop"))
            await queue.batch()
            counts.append(pace.streams)
        for each in (queue, queue, other):
            each.close()
        assert [*counts, pace.streams] == [0, 0, 1, 1, 0]

    in_loop(test)


def test_the_first_delta_of_each_request_does_not_wait() -> None:
    async def test() -> None:
        Clock()
        queue = paced(100)
        for index in range(3):
            queue.put(index, delta())
            assert len(await queue.batch()) == 1

    in_loop(test)


def test_other_answers_wait_again_after_the_last_delta_of_one() -> None:
    async def test() -> None:
        clock, queue = Clock(), paced()
        queue.put(0, delta("a", finish="stop"))
        queue.put(1, delta("b"))
        await queue.batch()
        queue.put(1, delta("c"))
        batch = asyncio.create_task(queue.batch())
        await clock.advance(0.004)
        assert not batch.done()
        queue.put(1, delta("d", finish="stop"))
        await clock.advance(0.0)
        assert len(batch.result()) == 2

    in_loop(test)


def test_without_a_pace_or_other_streams_nothing_waits() -> None:
    async def test() -> None:
        Clock()
        for queue in (DeltaQueue(), paced(1)):
            for _ in range(3):
                queue.put(0, delta())
                assert len(await queue.batch()) == 1

    in_loop(test)
