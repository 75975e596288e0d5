"""Targets that hold what users feel, and drafters that bring speed: the policy over simulated requests and clocks."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import quantiles

import pytest

from deployments.scaling.policy import (
    AimMemory,
    DrafterMemory,
    ReplicaLoad,
    ScalingRules,
    count_drafters,
    count_for_aims,
    count_targets,
)

RULES = ScalingRules("target", ttft_s=0.5, tokens_per_s=20)
TICK_S, STARTING_S, WINDOW_S, REPORT_S = 0.05, 20.0, 30.0, 10.0
TOKENS, PROMPT_S = 100, 0.1  # of each answer; of a prompt, alone


@dataclass
class Answering:
    """A request on a target."""

    arrived_s: float
    prompt_s: float = PROMPT_S  # that are left
    tokens: float = 0.0
    first_s: float | None = None


@dataclass
class Server:
    """Targets with 32 slots each, whose steps take 20 ms and 2 ms more for each row, scaled as Serve does it."""

    rate: float  # requests a second
    rules: ScalingRules = RULES
    step_s: float = 0.02
    row_s: float = 0.002
    shared: float = 1.0  # of a target's speed is left where several run
    most: int = 16
    now_s: float = 0.0
    wanted: int = 1
    up_at_s: list[float] = field(default_factory=lambda: [0.0])  # of each target
    rows: list[list[Answering]] = field(default_factory=lambda: [[]])  # of each target
    queue: deque[float] = field(default_factory=deque)  # arrivals of requests that wait for a slot
    firsts: list[tuple[float, float]] = field(default_factory=list)  # when, and the seconds since the arrival
    speeds: list[tuple[float, float]] = field(default_factory=list)
    memory: AimMemory = field(default_factory=AimMemory)
    since: tuple[int, float] = (0, 0.0)  # the direction that is needed, and since when
    path: list[int] = field(default_factory=lambda: [1])
    reports: list[ReplicaLoad] = field(default_factory=list)
    demands: deque[int] = field(default_factory=lambda: deque(maxlen=20))  # of the last seconds
    draws: random.Random = field(default_factory=lambda: random.Random(1))

    def run(self, seconds: float) -> None:
        ticks = round(seconds / TICK_S)
        for tick in range(ticks):
            self.now_s += TICK_S
            arrivals = int(self.rate * TICK_S) + (self.draws.random() < self.rate * TICK_S % 1)
            self.queue.extend([self.now_s] * arrivals)
            self._compute()
            if tick % round(REPORT_S / TICK_S) == 0:
                self._report()
            if tick % round(1 / TICK_S) == 0:
                self._scale()

    @property
    def running(self) -> int:
        return sum(up_at_s <= self.now_s for up_at_s in self.up_at_s)

    def _compute(self) -> None:
        up = self.rows[: self.running]
        while self.queue and len(least := min(up, key=len)) < 32:
            least.append(Answering(self.queue.popleft()))
        for rows in up:
            left_s = TICK_S * (self.shared if len(up) > 1 else 1)
            for row in rows:  # prompts first
                spent_s = min(row.prompt_s, left_s)
                row.prompt_s, left_s = row.prompt_s - spent_s, left_s - spent_s
            writing = [row for row in rows if row.prompt_s <= 1e-9]
            for row in writing:
                if row.first_s is None:
                    row.first_s = self.now_s
                    self.firsts.append((self.now_s, self.now_s - row.arrived_s))
                row.tokens += left_s / (self.step_s + self.row_s * len(writing))
                if row.tokens >= TOKENS:
                    self.speeds.append((self.now_s, TOKENS / max(self.now_s - row.first_s, TICK_S)))
                    rows.remove(row)

    def felt(self, since_s: float) -> tuple[float, float]:
        """Return the first-token time and the speed of a stream that nine tenths are better than."""
        firsts = [seconds for at_s, seconds in self.firsts if at_s >= since_s]
        speeds = [speed for at_s, speed in self.speeds if at_s >= since_s]
        if len(firsts) < 5 or len(speeds) < 5:
            return 0.0, 0.0
        return quantiles(firsts, n=10)[-1], quantiles(speeds, n=10)[0]

    def _report(self) -> None:
        ttft_s, speed = self.felt(self.now_s - WINDOW_S)
        self.reports = [
            ReplicaLoad(len(rows), 0, 32, queued=len(self.queue), ttft_s=ttft_s, tokens_per_s=speed)
            for rows in self.rows[: self.running]
        ]

    def _scale(self) -> None:
        running = self.running
        self.demands.append(sum(map(len, self.rows)) + len(self.queue))
        each = sum(self.demands) / len(self.demands) / running
        means = [ReplicaLoad(each, 0, 32) for _ in range(running)]
        count = count_targets(self.rules, self.wanted, means, self.reports, running=running)
        aimed, self.memory = count_for_aims(
            self.rules, self.wanted, means, self.reports, self.memory, self.now_s, running=running
        )
        count = max(1, min(max(count, aimed), self.most))
        direction = (count > self.wanted) - (count < self.wanted)
        if direction != self.since[0]:
            self.since = direction, self.now_s
        if direction and self.now_s - self.since[1] >= (10 if direction > 0 else 120):
            new = count - len(self.up_at_s)
            self.up_at_s = (self.up_at_s + [self.now_s + STARTING_S] * new)[:count]
            self.queue.extend(row.arrived_s for rows in self.rows[count:] for row in rows)  # they move
            self.rows = (self.rows + [[] for _ in range(new)])[:count]
            self.wanted, self.since = count, (0, self.now_s)
            self.path.append(count)


def test_the_aims_are_held_when_the_load_triples_and_nothing_flaps() -> None:
    server = Server(rate=3.0)
    server.run(300)
    ttft_s, speed = server.felt(server.now_s - 120)
    assert ttft_s <= 0.55
    assert speed >= 20 / 1.1
    before = server.wanted
    server.rate = 9.0
    server.run(400)
    ttft_s, speed = server.felt(server.now_s - 120)
    assert server.wanted > before
    assert ttft_s <= 0.55
    assert speed >= 20 / 1.1
    server.run(900)
    turns = [(b > a) != (c > b) for a, b, c in zip(server.path, server.path[1:], server.path[2:], strict=False)]
    assert sum(turns) <= 1  # one correction of a step that was too large


def test_targets_go_when_the_load_does() -> None:
    server = Server(rate=9.0)
    server.run(700)
    most = server.wanted
    server.rate = 1.0
    server.run(900)
    assert server.wanted <= most / 2
    ttft_s, speed = server.felt(server.now_s - 120)
    assert ttft_s <= 0.55
    assert speed >= 20 / 1.1


def test_one_target_serves_again_what_it_served_before_the_load_tripled() -> None:
    """Each of several targets on shared cores is slower: half of them don't take twice as long."""
    server = Server(rate=0.8, rules=ScalingRules("target", tokens_per_s=20), shared=0.8)
    for rate, path in ((0.8, [1]), (2.4, [1, 2, 3]), (0.8, [1, 2, 3, 1]), (2.4, [1, 2, 3, 1, 2, 3])):
        server.rate = rate
        server.run(900)
        assert server.path == path
        assert server.felt(server.now_s - 120)[1] >= 20 / 1.1


def memory_of(measurements: list[tuple[float, float]], count: int = 1) -> AimMemory:
    """Return what is remembered of a target with so many requests, and by what factor they missed an aim of 0.5 s."""
    memory = AimMemory(count)
    for tick, (rows, miss) in enumerate(measurements):
        load = loads(count, rows=rows, ttft_s=0.5 * miss)
        _, memory = count_for_aims(RULES, count, load, load, memory, 10.0 * tick, running=count)
    return memory


HELD = [(2.0, 0.6)] * 20


@pytest.mark.parametrize(
    ("measurements", "rows", "miss", "count"),
    [
        ([], 2, 0.6, 2),  # nothing is known: one might take twice as long
        (HELD, 2, 0.6, 1),
        (HELD, 2.4, 0.6, 1),
        (HELD, 3, 0.6, 2),  # more requests than were held
        (HELD, 2, 0.9, 2),  # two hold it barely
        (HELD[:3], 2, 0.6, 2),  # not for long
        ([*HELD, (2.2, 1.2)], 2, 0.6, 2),  # missed since, with as many
        ([*HELD, (6, 1.2)], 2, 0.6, 1),
        ([*HELD, (6, 0.7), (6, 0.7), (6, 1.2)], 5, 0.6, 2),  # the load grew before the first tokens were late
    ],
)
def test_fewer_targets_come_back_to_what_they_held(
    measurements: list[tuple[float, float]], rows: float, miss: float, count: int
) -> None:
    now = loads(2, rows=rows / 2, ttft_s=0.5 * miss)
    memory = replace(memory_of(measurements), count=2)
    assert count_for_aims(RULES, 2, now, now, memory, 1000.0, running=2)[0] == count


def test_an_aim_that_no_number_of_targets_holds_does_not_start_them_all() -> None:
    """A step alone takes too long: the first steps up show it, and are taken back for ten minutes."""
    server = Server(rate=1.0, step_s=0.08)
    server.run(1500)
    assert max(server.path) <= 4
    assert len(server.path) <= 8  # one trial in ten minutes


def loads(count: int, **given: float) -> list[ReplicaLoad]:
    return [ReplicaLoad(**{"rows": 4, "waiting": 0, "slots": 16, **given}) for _ in range(count)]


def test_one_request_for_each_target_is_no_load() -> None:
    for rows, count in ((1, 2), (4, 4)):
        slow = loads(2, rows=rows, ttft_s=5.0)
        assert count_for_aims(RULES, 2, slow, slow, AimMemory(2, 0.0), 100.0, running=2)[0] == count


def test_nothing_known_leaves_it_to_the_slots() -> None:
    assert count_for_aims(RULES, 2, loads(2), loads(2), AimMemory(2, 0.0), 100.0, running=2)[0] == 0


@pytest.mark.parametrize(
    ("drafted", "lag", "stay"),
    [
        (0.6, 0.2, True),  # two steps instead of five, and a fifth of the time lost
        (0.1, 0.2, False),  # what they spare is less than the wait for them
        (0.0, 0.0, False),  # others draft all there is
        (1.0, 0.9, True),  # nothing is known of answers yet
    ],
)
def test_drafters_stay_where_they_bring_speed(drafted: float, lag: float, stay: bool) -> None:
    memory, wanted, targets = DrafterMemory(present_at_s=0.0), 1, loads(2, drafted=drafted, lag=lag)
    for now_s in range(10, 200, 10):
        wanted, memory = count_drafters(wanted, targets, loads(wanted), memory, float(now_s))
    assert (wanted > 0) == stay


def test_drafters_that_brought_nothing_are_tried_again_after_ten_minutes() -> None:
    memory, wanted, seen = DrafterMemory(present_at_s=0.0), 1, []
    for now_s in range(10, 900, 10):
        wanted, memory = count_drafters(wanted, loads(2, drafted=0.01), loads(wanted), memory, float(now_s))
        seen.append(wanted)
    assert seen[:4] == [1, 1, 1, 1]
    assert seen.index(0) < 10
    assert seen.index(1, seen.index(0)) - seen.index(0) >= 59
    assert seen.count(0) > 60
