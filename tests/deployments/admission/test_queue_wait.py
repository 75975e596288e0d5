"""Predicted and simulated waiting times of requests. Time, models and clients are simulated."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean, quantiles
from typing import Any

import pytest

from actors.coordinator.request import Request
from decoding.errors import OverloadedError
from decoding.sampling.params import SamplingParams
from deployments.admission.admission import Admission
from deployments.admission.bounds import Limits
from deployments.admission.fair_queue import Sink
from deployments.configuration.api_keys import ApiKey
from tests.deployments.admission.test_admission import ENDPOINT, nothing

STEP_S = 0.05
SLOTS = 8
ALICE, BOB = ApiKey("alice"), ApiKey("bob")


@dataclass
class World:
    """A simulated target, whose running requests get one token per step, behind an `Admission`."""

    limits: Limits
    now_s: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)  # of answers, in tokens, by request
    written: dict[int, int] = field(default_factory=dict)  # tokens so far, of those that run
    began_s: dict[int, float] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.admission, self._ids = Admission(self, self.limits), count()

    def submit(self, request: Request, sink: Sink) -> None:
        self.written[request.request_id], self.began_s[request.request_id] = 0, self.now_s

    def cancel(self, request_id: int) -> None: ...

    def ask(self, length: int, *, most: int | None = None, key: ApiKey = ALICE, check: bool = True) -> int:
        """Submit a request of at most `most` tokens; return its id. check: whether it may be refused."""
        request = Request(ENDPOINT, [1], SamplingParams(max_tokens=most or length), request_id=next(self._ids))
        if check:
            self.admission.check([request], key)
        self.lengths[request.request_id] = length
        self.admission.submit(request, nothing, key=key)
        return request.request_id

    def fill(self, waiting: int, *, key: ApiKey = ALICE) -> None:
        """Fill all slots with requests that end one by one, and queue more."""
        for index in range(SLOTS + waiting):
            self.ask(40 + 5 * (index % SLOTS), key=key, check=False)

    def step(self) -> None:
        self.now_s += STEP_S
        for request_id in list(self.written):
            self.written[request_id] += 1
            self.admission.record_progress(request_id, self.written[request_id])
            if self.written[request_id] == self.lengths[request_id]:
                del self.written[request_id]
                self.ended_s[request_id] = self.now_s
                self.admission.finish(request_id)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def refusal(self, **given: Any) -> OverloadedError:
        with pytest.raises(OverloadedError) as refused:
            self.ask(40, **given)
        return refused.value


def in_world(test: Callable[[World], None], **limits: Any) -> None:
    """Run the test in an event loop with simulated time."""
    world = World(Limits(**{"max_requests": 10_000, "running": {ENDPOINT.target: SLOTS}, **limits}))

    async def run() -> None:
        loop: Any = asyncio.get_running_loop()
        real, loop.time = loop.time, lambda: world.now_s
        try:
            test(world)
        finally:
            loop.time = real

    asyncio.run(run())


def test_retry_after_is_the_wait_that_comes_to_be() -> None:
    def test(world: World) -> None:
        for waiting in (2, 5, 12, 20):
            world.fill(SLOTS + waiting)
            world.run(3)
            told_s = world.refusal().retry_after_s
            request_id = world.ask(40, check=False)
            asked_s = world.now_s
            while request_id not in world.began_s:
                world.step()
            waited_s = world.began_s[request_id] - asked_s
            assert waited_s - STEP_S < told_s < 1.25 * waited_s + 1.5
            world.run(60)

    in_world(test, max_queue_wait_s=0.001)


@pytest.mark.parametrize(("longest_s", "waiting"), [(None, SLOTS), (0.0, SLOTS), (1.0, 0), (60.0, 30 * SLOTS)])
def test_before_the_speed_is_known_a_bounded_number_may_wait(longest_s: float | None, waiting: int) -> None:
    def test(world: World) -> None:
        for _ in range(SLOTS + waiting):
            world.ask(40)
        refused = world.refusal()
        assert (refused.bound, refused.retry_after_s) == ("max_queue_wait_s", 1)
        assert "http.max_queue_wait_s allows" in str(refused)

    in_world(test, max_queue_wait_s=longest_s)


@pytest.mark.parametrize("most", [40, 8192])
def test_a_hundred_requests_at_once_are_answered(most: int) -> None:
    """By clients with two retries, as OpenAI's by default. They come over 2 s; the slots' prompts take 4 s to read."""
    attempts: Counter[int] = Counter()

    def test(world: World) -> None:
        due_s = {client: client / 50 for client in range(100)}
        while due_s or world.written:
            for client in [client for client, at_s in due_s.items() if at_s <= world.now_s]:
                attempts[client] += 1
                try:
                    world.ask(40, most=most)
                    del due_s[client]
                except OverloadedError as error:
                    assert attempts[client] < 3, "given up"
                    due_s[client] = world.now_s + error.retry_after_s
            if world.now_s < 4:
                world.now_s += STEP_S
            else:
                world.step()
        assert len(world.ended_s) == 100

    in_world(test, max_queue_wait_s=60.0)
    assert attempts.total() < 150


@pytest.mark.parametrize("waiting", [1, 7, 50, 333])
def test_the_wait_behind_requests_that_are_alike_is_right_within_an_answer(waiting: int) -> None:
    """For the key with most of the queue, and for the other one."""

    def test(world: World) -> None:
        for index in range(waiting):
            world.ask(40, key=BOB if index % 3 else ALICE, check=False)
        world.run(2)
        for key in (ALICE, BOB):
            ahead = world.admission._tokens_ahead(ENDPOINT.target, key)
            request_id, asked_s = world.ask(40, key=key, check=False), world.now_s
            while request_id not in world.began_s:
                world.step()
            assert ahead == pytest.approx((world.began_s[request_id] - asked_s) / STEP_S, abs=40), key

    in_world(test, max_queue_wait_s=None)


@pytest.mark.parametrize("limits", [{}, {"max_requests": 10**6, "max_tokens": 10**9}])
def test_checking_and_queueing_take_no_longer_for_a_long_queue(limits: dict[str, Any]) -> None:
    """Counted in lines of Python, 3000 requests in the queue against 30. limits: of the key.

    At the other target all slots are taken, and nobody waits.
    """
    key = ApiKey("alice", **limits)
    lines: Counter[int] = Counter()

    def test(world: World) -> None:
        world.fill(30 if not lines else 3000, key=key)
        elsewhere = Request(replace(ENDPOINT, target="other"), [1], SamplingParams(max_tokens=40), request_id=-1)
        world.admission.submit(elsewhere, nothing, key=key)
        length = len(world.admission._tickets)

        def count(frame: Any, event: str, argument: Any) -> Any:
            lines[length] += event == "line"
            return count

        traced = sys.gettrace()
        sys.settrace(count)
        try:
            world.admission.check_room([ENDPOINT.target], key)
            world.admission.check_room(["other"], key)
            world.ask(40, key=key)
        finally:
            sys.settrace(traced)

    in_world(test, max_queue_wait_s=1e6, max_tokens=10**9, running={ENDPOINT.target: SLOTS, "other": 1})
    in_world(test, max_queue_wait_s=1e6, max_tokens=10**9, running={ENDPOINT.target: SLOTS, "other": 1})
    short, long = lines.values()
    assert long < 2 * short


def test_a_short_wait_is_never_too_long() -> None:
    """A hundred answers of one token each take only a second."""

    def test(world: World) -> None:
        for _ in range(40):
            world.ask(1, check=False)
            world.ask(1, check=False)
            world.step()
        world.run(2)
        for _ in range(100):
            world.ask(1)

    in_world(test, max_queue_wait_s=None)


@dataclass
class Crowd:
    """Clients that send their next request after an answer, or after `Retry-After`."""

    world: World
    clients: int
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    latencies_s: list[float] = field(default_factory=list)
    refused: int = 0

    def run(self, seconds: float) -> None:
        free_at_s = [self.draw.uniform(0, 1) for _ in range(self.clients)]
        asked: dict[int, tuple[int, float]] = {}  # client and time, by request
        while self.world.now_s < seconds:
            for client, at_s in enumerate(free_at_s):
                if at_s <= self.world.now_s:
                    free_at_s[client] = self._ask(client, asked)
            self.world.step()
            for request_id in [request_id for request_id in asked if request_id in self.world.ended_s]:
                client, asked_s = asked.pop(request_id)
                free_at_s[client] = self.world.now_s
                self.latencies_s.append(self.world.now_s - asked_s)

    def _ask(self, client: int, asked: dict[int, tuple[int, float]]) -> float:
        try:
            request_id = self.world.ask(min(200, 10 + int(self.draw.expovariate(1 / 40))), most=200)
        except OverloadedError as error:
            self.refused += 1
            return self.world.now_s + error.retry_after_s
        asked[request_id] = client, self.world.now_s
        return float("inf")


@pytest.mark.parametrize("longest_s", [None, 2.0])
def test_twenty_times_too_many_clients(longest_s: float | None) -> None:
    """Under overload, accepted requests take at most twice as long as at capacity, and no slot is idle."""
    crowds: list[Crowd] = []

    def test(world: World) -> None:
        crowd = Crowd(world, clients=SLOTS * 20 if crowds else SLOTS)
        crowd.run(120)
        crowds.append(crowd)

    in_world(test, max_queue_wait_s=longest_s)
    in_world(test, max_queue_wait_s=longest_s)
    capacity, overload = crowds
    p99_s = [quantiles(crowd.latencies_s, n=100)[-1] for crowd in crowds]
    assert p99_s[1] < 2 * p99_s[0]
    assert fmean(overload.latencies_s) < 2.2 * fmean(capacity.latencies_s)
    assert len(overload.latencies_s) > 0.95 * len(capacity.latencies_s)
    assert capacity.refused == 0


def test_a_backlog_of_one_key_refuses_no_other() -> None:
    def test(world: World) -> None:
        world.fill(2 * SLOTS)
        world.run(1)
        world.fill(SLOTS)
        world.refusal(key=ALICE)
        world.ask(40, key=BOB)

    in_world(test, max_queue_wait_s=3.0)


def test_requests_that_belong_together_are_taken_on_together() -> None:
    """Requests of one group don't count as each other's queue."""

    def test(world: World) -> None:
        requests = [Request(ENDPOINT, [1], SamplingParams(max_tokens=40)) for _ in range(10 * SLOTS)]
        world.admission.check(requests)
        for request in requests:
            world.admission.submit(request, nothing)
        with pytest.raises(OverloadedError):
            world.admission.check(requests[:1])

    in_world(test, max_queue_wait_s=None)


def test_an_unread_request_is_refused_where_all_its_targets_are_full() -> None:
    def test(world: World) -> None:
        world.fill(3 * SLOTS)
        world.admission.check_room([ENDPOINT.target, "other"], ALICE)
        world.admission.check_room([], ALICE)
        with pytest.raises(OverloadedError):
            world.admission.check_room([ENDPOINT.target], ALICE)

    in_world(test, max_queue_wait_s=None, running={ENDPOINT.target: SLOTS, "other": SLOTS})


def test_unserved_requests_are_waiting_or_refused_ones() -> None:
    """40 clients on 8 slots lack 32 slots, whether they wait or retry."""
    for longest_s in (None, 1000.0):

        def test(world: World) -> None:
            crowd = Crowd(world, clients=40)
            crowd.run(60)
            assert 24 <= world.admission.count_unserved(ENDPOINT.target) <= 40
            assert world.admission.count_unserved("other") == 0
            world.run(60)
            assert world.admission.count_unserved(ENDPOINT.target) < 1

        in_world(test, max_queue_wait_s=longest_s)
