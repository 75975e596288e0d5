"""Admission: bounds, order, fairness, deadlines. Requests end only when the test ends them."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from actors.coordinator.request import Delta, Endpoint, Request, Statistics
from actors.wire.messages import ReplicaAddress
from decoding.errors import DeadlineError, OverloadedError
from decoding.sampling.params import SamplingParams
from deployments.admission.admission import Admission
from deployments.admission.bounds import Limits, limits_of
from deployments.admission.fair_queue import Sink
from deployments.configuration.api_keys import ApiKey
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.configuration.model import ScalingConfig
from deployments.endpoints.service import Service
from tests.deployments.fake_coordinator import FakeCoordinator

ENDPOINT = Endpoint("e", "target", None, 0, lambda ids: "")
ALICE, BOB = ApiKey("alice"), ApiKey("bob")


class Backend:
    """Records the requests that begin."""

    def __init__(self) -> None:
        self.begun: list[Request] = []
        self.cancelled: list[int] = []

    def submit(self, request: Request, sink: Sink) -> None:
        self.begun.append(request)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    @property
    def ids(self) -> list[int]:
        return [request.request_id for request in self.begun]


def request(number: int, *, tokens: int = 10, timeout_s: float | None = None) -> Request:
    params = SamplingParams(max_tokens=tokens - 1)
    return Request(ENDPOINT, [1], params, timeout_s=timeout_s, request_id=number)


def in_loop(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def nothing(_: Delta) -> None: ...


def make(**limits: Any) -> tuple[Admission, Backend]:
    backend = Backend()
    return Admission(backend, Limits(**{"running": {"target": 1}, **limits})), backend


def test_what_fits_begins_at_once_and_the_rest_when_something_ends() -> None:
    async def run() -> None:
        admission, backend = make(running={"target": 2})
        for number in range(4):
            admission.submit(request(number), nothing)
        assert backend.ids == [0, 1]
        assert admission.counts() == ({"e": 2}, {"e": 2})
        admission.finish(1)
        admission.cancel(0)
        assert backend.ids == [0, 1, 2, 3]
        assert backend.cancelled == [0]

    in_loop(run())


def test_requests_that_end_while_they_wait_are_forgotten() -> None:
    """The others begin as they would have, and what ended takes no memory."""

    async def run() -> None:
        admission, backend = make(max_requests=1000)
        for number in range(6):
            admission.submit(request(number), nothing, priority=-number if number else 0)
        for number in range(100, 1000):
            admission.submit(request(number), nothing, priority=-3)
            admission.cancel(number)
        (line,) = admission._queue._lines["target"].values()
        assert len(line.entries) < 30
        for number in (0, 5, 4, 3, 2):
            admission.finish(number)
        assert backend.ids == [0, 5, 4, 3, 2, 1]

    in_loop(run())


def test_what_is_cancelled_while_it_waits_never_begins() -> None:
    async def run() -> None:
        admission, backend = make()
        for number in range(3):
            admission.submit(request(number), nothing)
        admission.cancel(1)
        admission.finish(0)
        assert backend.ids == [0, 2]
        assert backend.cancelled == []

    in_loop(run())


def test_bounds_are_of_requests_and_of_tokens() -> None:
    async def run() -> None:
        admission, _ = make(max_requests=2)
        admission.submit(request(0), nothing)
        admission.submit(request(1), nothing)
        with pytest.raises(OverloadedError, match="2 requests are in progress already") as refused:
            admission.submit(request(2), nothing)
        assert refused.value.retry_after_s >= 1
        admission.finish(0)
        admission.submit(request(2), nothing)
        admission, _ = make(max_tokens=25)
        admission.submit(request(0), nothing)
        admission.submit(request(1), nothing)
        with pytest.raises(OverloadedError, match="tokens in progress would exceed 25"):
            admission.submit(request(2), nothing)
        admission.submit(request(3, tokens=5), nothing)

    in_loop(run())


def test_a_key_has_bounds_of_its_own() -> None:
    async def run() -> None:
        admission, _ = make()
        small = ApiKey("small", max_requests=1)
        admission.submit(request(0), nothing, key=small)
        with pytest.raises(OverloadedError, match="this API key has 1 requests in progress"):
            admission.submit(request(1), nothing, key=small)
        admission.submit(request(2), nothing, key=BOB)

    in_loop(run())


async def order_of(admission: Admission, backend: Backend) -> list[int]:
    """End requests one by one; return the order in which waiting requests begin."""
    while sum(admission.counts()[0].values()):
        admission.finish(backend.ids[-1])
    return backend.ids


def test_a_backlog_of_one_key_does_not_hold_up_another() -> None:
    async def run() -> None:
        admission, backend = make()
        for number in range(6):
            admission.submit(request(number), nothing, key=ALICE)
        for number in (10, 11):
            admission.submit(request(number), nothing, key=BOB)
        order = await order_of(admission, backend)
        assert order.index(10) <= 2
        assert order.index(11) <= 4
        assert [number for number in order if number < 10] == list(range(6))

    in_loop(run())


def test_weights_are_shares_of_tokens() -> None:
    async def run() -> None:
        admission, backend = make()
        heavy = ApiKey("heavy", weight=3)
        for number in range(40):
            admission.submit(request(number), nothing, key=heavy)
            admission.submit(request(100 + number), nothing, key=BOB)
        first = (await order_of(admission, backend))[:40]
        assert 28 <= sum(number < 100 for number in first) <= 32

    in_loop(run())


def test_a_key_that_was_idle_has_saved_up_nothing() -> None:
    async def run() -> None:
        admission, backend = make()
        for number in range(10):
            admission.submit(request(number), nothing, key=ALICE)
        for number in range(5):
            admission.finish(number)
        for number in range(100, 110):
            admission.submit(request(number), nothing, key=BOB)
        later = (await order_of(admission, backend))[6:]
        assert [number < 100 for number in later[:6]].count(True) >= 2

    in_loop(run())


def test_urgent_requests_of_a_key_come_first() -> None:
    async def run() -> None:
        admission, backend = make()
        for number, priority in ((0, 0), (1, 5), (2, -1), (3, 0)):
            admission.submit(request(number), nothing, priority=priority)
        assert await order_of(admission, backend) == [0, 2, 3, 1]

    in_loop(run())


def test_deadlines_hold_in_the_queue_and_shrink_by_it() -> None:
    async def run() -> None:
        admission, backend = make()
        deltas: list[Delta] = []
        admission.submit(request(0), nothing)
        admission.submit(request(1, timeout_s=0.02), deltas.append)
        admission.submit(request(2, timeout_s=60), nothing)
        await asyncio.sleep(0.05)
        assert isinstance(deltas[0].error, DeadlineError)
        admission.finish(1)
        admission.finish(0)
        timeout_s = backend.begun[-1].timeout_s
        assert timeout_s is not None
        assert 59 < timeout_s < 60

    in_loop(run())


def test_a_refusal_when_it_is_a_requests_turn_reaches_its_client() -> None:
    class Full(Backend):
        def submit(self, request: Request, sink: Sink) -> None:
            raise OverloadedError("full")

    async def run() -> None:
        deltas: list[Delta] = []
        Admission(Full(), Limits()).submit(request(0), deltas.append)
        assert isinstance(deltas[0].error, OverloadedError)
        assert deltas[0].statistics == Statistics()

    in_loop(run())


def test_replicas_that_came_later_are_used_too() -> None:
    async def run() -> None:
        backend, slots = Backend(), {"target": 1}
        admission = Admission(backend, Limits(running={"target": 1}), count_slots=slots.__getitem__)
        for number in range(8):
            admission.submit(request(number), nothing)
        assert backend.ids == [0, 1, 2]
        slots["target"] = 4
        admission.finish(0)
        assert backend.ids == [0, 1, 2, 3, 4, 5, 6]

    in_loop(run())


class Starting(FakeCoordinator):
    """Has no slots until it hears of replicas, and answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = 0

    def submit(self, request: Request, sink: Sink) -> None:
        self.requests.append(request)

    def set_replicas(self, addresses: list[ReplicaAddress], healthy: set[str]) -> None:
        self.slots = 4


def test_replicas_that_come_do_not_wait_for_an_answer_to_end() -> None:
    async def run() -> None:
        coordinator: Any = Starting()
        service = Service({}, coordinator, limits=Limits(running={"target": 1}))
        for number in range(8):
            service.metrics.record_arrival([request(number)])
            service.admission.submit(request(number), nothing)
        service.admission.cancel(2)
        assert len(coordinator.requests) == 1
        service.set_replicas([], set())
        begun = [request.request_id for request in coordinator.requests]
        assert begun == [0, 1, 3, 4, 5, 6]  # four slots, and two more
        assert service.admission.counts() == ({"e": 1}, {"e": 6})

    in_loop(run())


def test_the_bound_follows_the_memory_and_the_slots_that_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_memory(free_bytes: int) -> None:
        monkeypatch.setattr("deployments.admission.bounds.free_host_bytes", lambda: free_bytes)

    config = load_config(TINY_CONFIG)
    give_memory(16 * 2**30)
    assert limits_of(config).max_requests == 2048
    give_memory(2**40)
    assert limits_of(config).max_requests == 8192
    give_memory(2**30)
    assert limits_of(config).max_requests == 256
    config.models["target"].replicas = 10
    assert limits_of(config).max_requests == 320
    config.models["target"].scaling = ScalingConfig(max=20)
    assert limits_of(config).max_requests == 640
    config.http.max_requests = 24
    assert limits_of(config).max_requests == 24


def test_the_longest_wait_is_configured() -> None:
    config = load_config(TINY_CONFIG)
    assert limits_of(config).max_queue_wait_s == 60
    config.http.max_queue_wait_s = 7.5
    assert limits_of(config).max_queue_wait_s == 7.5


def test_coordinators_share_the_slots_of_a_target() -> None:
    """Ten slots configured, and as many live: each of two lets half of them through, and two more."""

    async def run() -> None:
        backend, coordinators = Backend(), [2]
        admission = Admission(
            backend,
            Limits(running={"target": 10}),
            count_slots=lambda target: 10 // coordinators[0],
            count_coordinators=lambda: coordinators[0],
        )
        for number in range(20):
            admission.submit(request(number), nothing)
        assert len(backend.begun) == 5 + 2
        coordinators[0] = 1  # the other is gone
        admission.finish(0)
        assert len(backend.begun) == 1 + 10 + 2

    in_loop(run())
