"""How many replicas a model should have, in worlds made of numbers."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from actors.loops.thread import LoopTimes
from actors.wire.messages import Report
from deployments.admission.admission import Admission
from deployments.admission.bounds import Limits
from deployments.monitoring.replica_metrics import LoadMeter
from deployments.scaling import policy as autoscaling
from deployments.scaling.policy import DrafterMemory, ReplicaLoad, ScalingRules, count_drafters, count_targets, scale
from tests.deployments.admission.test_admission import Backend, request

TARGET = ScalingRules("target")
DRAFTER = ScalingRules("drafter", targets=["Target-t"])


def loads(count: int, **given: float) -> list[ReplicaLoad]:
    return [ReplicaLoad(**{"rows": 0, "waiting": 0, "slots": 16, **given}) for _ in range(count)]


def targets(current: int, replicas: list[ReplicaLoad]) -> int:
    """What is wanted where all are up."""
    return count_targets(TARGET, current, replicas, running=current)


@pytest.mark.parametrize(
    ("replicas", "rows", "waiting", "wanted"),
    [(1, 0, 0, 0), (1, 12, 0, 1), (1, 13, 0, 2), (1, 16, 32, 4), (2, 16, 0, 3), (4, 0, 0, 0)],
)
def test_targets_follow_demand(replicas: int, rows: int, waiting: int, wanted: int) -> None:
    assert targets(replicas, loads(replicas, rows=rows, waiting=waiting)) == wanted


def test_targets_stay_where_fewer_would_be_nearly_full() -> None:
    assert targets(2, loads(2, rows=5.5)) == 2  # 11 of 16 would be 0.69
    assert targets(2, loads(2, rows=4.5)) == 1  # 9 of 16 are 0.56


def test_what_coordinators_hold_back_is_demand_and_counts_once() -> None:
    assert targets(1, loads(1, slots=32, rows=32, waiting=2, queued=166)) == 9  # 200 on 24 of 32 slots
    assert targets(4, loads(4, slots=32, rows=32, waiting=2, queued=64)) == 9
    assert targets(8, loads(4, slots=32, rows=25, queued=0)) == 9  # four have not reported yet


@dataclass
class Fleet:
    """Targets as Serve scales them: by means over 20 s, after its delays. A replica is up 15 s after that."""

    clients: int = 0  # each with one request at a time
    now_s: int = 0
    wanted: int = 1
    history: list[tuple[int, list[ReplicaLoad]]] = field(default_factory=lambda: [(0, [])])  # of each: since when
    since_s: dict[bool, int] = field(default_factory=dict)  # more (or fewer) have been needed
    path: list[int] = field(default_factory=lambda: [1])

    def run(self, seconds: int, *, most: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self._observe()
            windows = [seen[-20:] for since_s, seen in self.history if since_s <= self.now_s]
            means = [
                ReplicaLoad(**{name: _mean(window, name) for name in ("rows", "waiting", "slots", "queued")})
                for window in windows
            ]
            latest = [window[-1] for window in windows]
            self._follow(max(1, min(count_targets(TARGET, self.wanted, means, latest, running=len(means)), most)))

    def _observe(self) -> None:
        up = [seen for since_s, seen in self.history if since_s <= self.now_s]
        let_through = min(self.clients, 32 * len(up) + 2)  # as admission does
        rows = min(let_through, 32 * len(up)) / len(up)
        waiting = let_through / len(up) - rows
        for seen in up:
            seen.append(ReplicaLoad(rows, waiting, 32, queued=self.clients - let_through))

    def _follow(self, count: int) -> None:
        more = count > self.wanted
        self.since_s = {} if count == self.wanted else {more: self.since_s.get(more, self.now_s)}
        if self.since_s and self.now_s - self.since_s[more] >= (10 if more else 120):
            new = [(self.now_s + 15, list[ReplicaLoad]()) for _ in range(count - self.wanted)]
            self.history = (self.history + new)[:count]
            self.wanted, self.since_s = count, {}
            self.path.append(count)


def _mean(loads: list[ReplicaLoad], name: str) -> float:
    return sum(getattr(load, name) for load in loads) / len(loads)


def test_a_long_queue_is_answered_at_once_and_nothing_flaps() -> None:
    fleet = Fleet(clients=200)
    fleet.run(600, most=12)
    assert fleet.path == [1, 9]
    fleet.clients = 30
    fleet.run(900, most=12)
    assert fleet.path == [1, 9, 2]
    fleet.clients = 200
    fleet.run(600, most=8)
    assert fleet.path == [1, 9, 2, 8]


def test_a_target_without_replicas_starts_when_it_is_called() -> None:
    assert scale({"t": deployment("Target-t", TARGET, [], {})})[0] == {"t": 0}
    assert scale({"t": deployment("Target-t", TARGET, [], {}, queued=1.0)})[0] == {"t": 1}
    assert scale({"t": deployment("Target-t", TARGET, loads(1), {})})[0] == {"t": 0}  # Serve knows the bounds


def test_a_new_queue_counts_by_its_latest_report() -> None:
    means = loads(1, slots=32, rows=10, queued=16)
    latest = loads(1, slots=32, rows=32, waiting=2, queued=166)
    assert count_targets(TARGET, 1, means, latest, running=1) == 9
    assert count_targets(TARGET, 9, loads(9, slots=32, rows=20), loads(9, slots=32), running=9) == 9


def test_what_is_not_heard_of_is_like_the_others() -> None:
    assert targets(3, []) == 3
    assert targets(4, loads(2, rows=11)) == 4


def test_replicas_that_start_are_not_taken_to_be_loaded() -> None:
    """Otherwise ever more are started while the first ones load."""
    assert count_targets(TARGET, 4, loads(1, rows=16, waiting=32), running=1) == 4


@dataclass
class World:
    """Targets whose rows wait for drafts as `lag` says, by the number of drafters; a drafter is up at the next look."""

    lag: Mapping[int, float]
    rows: float = 8
    drafting: float = 1.0
    waiting: float = 0  # rows that find no slot at a drafter
    now_s: float = 1000.0
    wanted: int = 0
    memory: DrafterMemory = field(default_factory=lambda: DrafterMemory(present_at_s=1000.0))

    def after(self, looks: int, *, period_s: float = 10.0) -> list[int]:
        seen = []
        for _ in range(looks):
            self.now_s += period_s
            targets = loads(2, rows=self.rows, drafting=self.drafting, lag=self.lag[self.wanted])
            drafters = loads(self.wanted, waiting=self.waiting)
            self.wanted, self.memory = count_drafters(self.wanted, targets, drafters, self.memory, self.now_s)
            seen.append(self.wanted)
        return seen


def test_no_drafter_without_requests() -> None:
    world = World({0: 0.0, 1: 0.0, 2: 0.0}, rows=0)
    assert world.after(3) == [0, 0, 0]
    world.wanted = 2
    assert world.after(1) == [0]


def test_one_drafter_where_drafts_are_wanted_and_more_while_that_helps() -> None:
    world = World({0: 0.0, 1: 0.5, 2: 0.3, 3: 0.1, 4: 0.09})
    assert world.after(6) == [1, 2, 3, 3, 3, 3]


def test_drafters_that_gain_nothing_go_and_are_not_tried_again_soon() -> None:
    world = World({0: 0.0, 1: 0.3, 2: 0.29})  # the link is slow, not the drafter
    assert world.after(6) == [1, 2, 1, 1, 1, 1]
    assert 2 in world.after(70)  # after ten minutes, nobody knows any more


def test_drafters_that_nobody_waits_for_go_one_by_one() -> None:
    world = World({1: 0.0, 2: 0.0, 3: 0.0}, wanted=3)
    assert world.after(3) == [2, 1, 1]


def test_no_flapping_between_two_counts() -> None:
    world = World({0: 0.0, 1: 0.4, 2: 0.01, 3: 0.0})
    assert world.after(20) == [1] + 19 * [2]


def test_rows_without_a_slot_at_a_drafter_need_another() -> None:
    world = World(dict.fromkeys(range(9), 0.1), waiting=1)
    assert world.after(3) == [1, 2, 3]


def test_drafters_whose_slots_are_needed_stay() -> None:
    memory = DrafterMemory(present_at_s=1000.0, lags={"1": (0.1, 1000.0)})
    targets = loads(2, rows=10, lag=0.0)  # nobody waits for drafts
    assert count_drafters(2, targets, loads(2, rows=10), memory, 1000.0)[0] == 2  # 20 rows, 16 slots each
    assert count_drafters(2, targets, loads(2, rows=8), memory, 1000.0)[0] == 1


def test_no_drafter_where_plain_decoding_wins_but_a_probe_now_and_then() -> None:
    world = World({0: 0.0, 1: 0.0}, drafting=0.1, wanted=1)
    assert world.after(1) == [0]
    assert world.after(59) == 59 * [0]
    assert world.after(3) == [1, 0, 0]  # Serve's delays give it time
    world.drafting = 1.0
    assert world.after(1) == [1]


def test_replicas_that_are_coming_up_are_waited_for() -> None:
    memory = DrafterMemory(present_at_s=0.0)
    targets = loads(1, rows=8, lag=0.9)
    assert count_drafters(2, targets, loads(1), memory, 1.0)[0] == 2


def deployment(
    name: str, rules: ScalingRules | None, replicas: list[ReplicaLoad], state: dict[str, Any], queued: float = 0.0
) -> Any:
    metrics: dict[str, dict[str, float]] = {"running_requests": {"r0": 3.0}}
    for time_s, load in enumerate(replicas):
        for key, value in asdict(load).items():
            metrics.setdefault(key, {})[f"r{time_s}"] = value
    options = {} if rules is None else {name: getattr(rules, name) for name in ScalingRules.__dataclass_fields__}
    return SimpleNamespace(
        deployment_name=name,
        target_num_replicas=len(replicas),
        current_num_replicas=len(replicas),
        policy_state=state,
        current_time=5000.0,
        config=SimpleNamespace(policy=SimpleNamespace(policy_kwargs=options)),
        aggregated_metrics=metrics,
        raw_metrics={
            name: {
                replica: [SimpleNamespace(value=0.0), SimpleNamespace(value=value)] for replica, value in values.items()
            }
            for name, values in metrics.items()
        },
        total_queued_requests=queued,
    )


def test_the_policy_as_serve_calls_it() -> None:
    """Serve keeps its own keys in the state, pickles the function, and has deployments that are none of ours."""
    cloudpickle.register_pickle_by_value(autoscaling)
    try:
        policy = cloudpickle.loads(cloudpickle.dumps(scale))
    finally:
        cloudpickle.unregister_pickle_by_value(autoscaling)
    deployments = {
        "t": deployment("Target-t", TARGET, loads(1, rows=16, waiting=4, lag=0.5), {}),
        "d": deployment("Drafter-d", DRAFTER, loads(1), {"internal": 1}),
        "other": deployment("Other", None, [], {}),
    }
    counts, states = policy(deployments)
    assert counts == {"t": 2, "d": 2}
    deployments["d"] = deployment("Drafter-d", DRAFTER, loads(2), {"internal": 1, **states["d"]})
    assert policy(deployments)[0]["d"] == 1  # the second gained nothing


def test_the_queues_of_two_coordinators_reach_the_policy_and_count_once() -> None:
    """Each has 100 requests and lets 34 through to two replicas, which hear of both."""

    async def run() -> list[ReplicaLoad]:
        meters = [LoadMeter(), LoadMeter()]
        for name in ("one", "two"):
            admission = Admission(Backend(), Limits(running={"target": 34}), count_slots=lambda target: 32)
            for number in range(100):
                admission.submit(request(number), lambda delta: None)
            for meter in meters:
                meter.note_coordinator(name, admission.count_unserved("target"))
        return [meter.measure(Report(32, 2, 32, []), LoopTimes()) for meter in meters]

    replicas = asyncio.run(run())
    assert [load.queued for load in replicas] == [132, 132]
    assert scale({"t": deployment("Target-t", TARGET, replicas, {})})[0] == {"t": 9}  # 200 on 24 of 32 slots


def test_drafters_stay_where_nothing_is_known_of_their_targets() -> None:
    """A target that was scaled by hand is none of the policy's deployments."""
    counts, _ = scale({"d": deployment("Drafter-d", DRAFTER, loads(2), {})})
    assert counts == {"d": 2}
    assert scale({"d": deployment("Drafter-d", DRAFTER, [], {})})[0] == {"d": 1}


def test_a_replica_sums_what_live_coordinators_hold_back() -> None:
    now_s = [0.0]
    meter = LoadMeter(clock=lambda: now_s[0])

    def queued() -> float:
        return meter.measure(Report(3, 2, 16, []), LoopTimes()).queued

    assert queued() == 0
    meter.note_coordinator("one", 40)
    meter.note_coordinator("two", 60)
    assert queued() == 100
    now_s[0] = 3.0
    meter.note_coordinator("one", 10)
    assert queued() == 70
    assert meter.count_coordinators() == 2
    now_s[0] = 6.0  # "two" is gone
    assert queued() == 10
    assert meter.count_coordinators() == 1


def test_a_replica_tells_its_load() -> None:
    meter = LoadMeter()
    report = Report(3, 0, 16, [], drafting=False)
    first = meter.measure(report, LoopTimes(5, step_s=3.0, prefill_s=1.0, waited_s=1.0, idle_s=5.0))
    assert first == ReplicaLoad(3, 0, 16, drafting=0.0, lag=0.2, busy=0.4)
    assert meter.measure(report, LoopTimes(5, step_s=3.0, prefill_s=1.0, waited_s=1.0, idle_s=15.0)) == ReplicaLoad(
        3, 0, 16, 0.0, 0.0, 0.0
    )


def test_while_rows_wait_for_memory_the_running_ones_count_as_all_that_fit() -> None:
    assert LoadMeter().measure(Report(3, 2, 16, []), LoopTimes()).slots == 3
