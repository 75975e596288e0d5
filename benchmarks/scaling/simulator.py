"""Discrete-event simulation of drafters, targets and coordinators: the loops of `actors/` with a simulated clock.

Inputs are costs of turns, acceptance and latency; the result is tokens per second. No model runs. A row has a number of
tokens, and the number of the drafter's next tokens that are right. Drafts are chains: alternatives are not simulated.
"""

import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

Costs = Callable[[int, int], float]  # rows, tokens of all rows -> seconds of a turn
_PATIENCE, _SMOOTHING, _DRIFT = 1.5, 0.1, 0.99  # as in actors/verifier/policy.py
Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A system to simulate. Times in seconds."""

    targets: int = 1
    drafters: int = 1
    streams: int = 1  # per target; each has one request after the other
    answer_tokens: int = 256
    draft_length: Callable[[int], int]  # γ, by the rows of the target's batch
    acceptance: float  # probability that a draft token is accepted if those before it are
    target_turn_s: Costs
    drafter_turn_s: Costs
    link_s: float = 0.0001  # one way, between any two processes
    coordinators: int = 1  # each has an equal share of the requests
    coordinator_batch_s: float = 0.0  # per batch of verdicts
    coordinator_verdict_s: float = 0.0  # per verdict
    seed: int = 0


@dataclass(slots=True, eq=False)
class _Row:
    """A request. Positions count the answer's tokens."""

    target: "_Target"
    drafter: "_Drafter | None"
    coordinator: "_Coordinator"
    remaining: int  # tokens to commit
    right: int  # number of the drafter's next tokens that are right
    committed: int = 0
    branch: int = 0  # number of the drafter's mistakes; drafts of earlier branches are void
    drafted_to: int = 0  # end of the draft at the target
    expects: bool = True  # as TargetRow.expects_drafts
    waiting_since_s: float | None = None
    drafted_at_plan: int = 0
    deadline_s: float = 0.0
    # State at the drafter.
    known: int = 0
    known_branch: int = 0
    ahead_to: int = 0

    def draft_length(self, most: int) -> int:
        """Return the number of draft tokens that can be verified now."""
        return max(0, min(self.drafted_to - self.committed, most, self.remaining - 1))


@dataclass(frozen=True, slots=True)
class _Offer:
    row: _Row
    branch: int
    to: int


@dataclass(frozen=True, slots=True)
class _StepResult:
    row: _Row
    committed: int
    branch: int
    finished: bool


class _Inbox:
    """Batches of messages that have arrived, and an event for the next one."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._batches: list[list[Any]] = []
        self.arrival = env.event()  # of the next batch; already triggered if one has arrived

    def deliver(self, batch: list[Any], delay_s: float) -> None:
        """Deliver a batch after a delay."""
        self._env.timeout(delay_s).callbacks.append(lambda _: self._arrive(batch))

    def _arrive(self, batch: list[Any]) -> None:
        self._batches.append(batch)
        if not self.arrival.triggered:
            self.arrival.succeed()

    def take(self) -> list[list[Any]]:
        """Return all batches that have arrived."""
        batches, self._batches = self._batches, []
        if self.arrival.triggered:
            self.arrival = self._env.event()
        return batches


class _Coordinator:
    """Handles batches of verdicts one after the other, at a cost."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.inbox = _Inbox(world.env)
        self.busy_s = 0.0
        world.env.process(self._run())

    def _run(self) -> Process:
        scenario = self._world.scenario
        while True:
            yield self.inbox.arrival
            batches = self.inbox.take()
            verdicts = [verdict for batch in batches for verdict in batch]
            cost_s = len(batches) * scenario.coordinator_batch_s + len(verdicts) * scenario.coordinator_verdict_s
            self.busy_s += cost_s
            yield self._world.env.timeout(cost_s)
            for verdict in verdicts:
                if verdict.finished:
                    self._world.finish(verdict.row)


class _Target:
    """Simulates actors/verifier/loop.py: waits for drafts while that pays, then runs a turn over all rows."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.inbox = _Inbox(world.env)
        self.rows: list[_Row] = []
        self.busy_s = 0.0
        self._draft_token_s: float | None = None
        self._mean_turn_s = world.scenario.target_turn_s(1, 1)
        self.arrived = world.env.event()  # triggered when an idle target gets a row
        world.env.process(self._run())

    def _run(self) -> Process:
        env = self._world.env
        while True:
            if not self.rows:
                yield self.arrived
            self._receive()
            wait_s = max(row.deadline_s for row in self.rows) - env.now if any(map(self._waits, self.rows)) else 0.0
            if wait_s > 0:
                yield env.any_of([self.inbox.arrival, env.timeout(wait_s)])
                continue
            yield from self._turn(list(self.rows))

    def _waits(self, row: _Row) -> bool:
        return row.expects and row.deadline_s > self._world.env.now and not self._complete(row)

    def _complete(self, row: _Row) -> bool:
        return row.draft_length(self._most) >= min(self._most, row.remaining - 1)

    @property
    def _most(self) -> int:
        return self._world.scenario.draft_length(max(1, len(self.rows)))

    def _turn(self, rows: list[_Row]) -> Process:
        world, most = self._world, self._most
        drafts = [row.draft_length(most) for row in rows]
        for row, drafted in zip(rows, drafts, strict=True):
            if row.waiting_since_s is not None:
                self._note_latency(row)
            row.expects = row.expects and drafted > 0
        cost_s = world.scenario.target_turn_s(len(rows), len(rows) + sum(drafts))
        self.busy_s += cost_s
        self._mean_turn_s += _SMOOTHING * (cost_s - self._mean_turn_s)
        yield world.env.timeout(cost_s)
        parcels: dict[_Inbox, list[Any]] = {}
        for row, drafted in zip(rows, drafts, strict=True):
            verdict = self._commit(row, drafted)
            parcels.setdefault(row.coordinator.inbox, []).append(verdict)
            if row.drafter is not None and not verdict.finished:
                parcels.setdefault(row.drafter.inbox, []).append(verdict)
        for inbox, batch in parcels.items():
            inbox.deliver(batch, world.scenario.link_s)
        self._receive()
        self._plan()

    def _commit(self, row: _Row, drafted: int) -> _StepResult:
        """Accept the right draft tokens, and add the target's own token, which may equal the drafter's next one."""
        world = self._world
        accepted = min(drafted, row.right)
        count = min(accepted + 1, row.remaining)
        row.committed += count
        row.remaining -= count
        if row.right >= count:
            row.right -= count
        else:  # the drafter made a mistake
            row.branch += 1
            row.right = world.draw_right()
            row.drafted_to = row.committed
        world.committed += count
        if row.remaining == 0:
            self.rows.remove(row)
        return _StepResult(row, row.committed, row.branch, finished=row.remaining == 0)

    def _plan(self) -> None:
        """Decide how long to wait for the rows' next drafts."""
        now_s = self._world.env.now
        patience_s = self._mean_turn_s
        if self._draft_token_s is not None:
            self._draft_token_s *= _DRIFT
            patience_s = min(_PATIENCE * self._most * self._draft_token_s, patience_s)
        for row in self.rows:
            row.drafted_at_plan = row.draft_length(self._most)
            row.waiting_since_s = None if self._complete(row) or not row.expects else now_s
            row.deadline_s = now_s + patience_s

    def _receive(self) -> None:
        for batch in self.inbox.take():
            for offer in batch:
                row = offer.row
                if offer.branch == row.branch and offer.to > row.committed:
                    row.drafted_to = max(row.drafted_to, offer.to)
                    row.expects = True
                    if row.waiting_since_s is not None and self._complete(row):
                        self._note_latency(row)

    def _note_latency(self, row: _Row) -> None:
        assert row.waiting_since_s is not None
        got = max(row.draft_length(self._most) - row.drafted_at_plan, 0.5)
        latency_s = (self._world.env.now - row.waiting_since_s) / got
        row.waiting_since_s = None
        if self._draft_token_s is None:
            self._draft_token_s = latency_s
        self._draft_token_s += _SMOOTHING * (latency_s - self._draft_token_s)


class _Drafter:
    """Simulates actors/drafter/loop.py: each turn adds a token to every chain below its lookahead."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.inbox = _Inbox(world.env)
        self.rows: list[_Row] = []
        self.busy_s = 0.0
        world.env.process(self._run())

    def _run(self) -> Process:
        while True:
            self._receive()
            drafting = [row for row in self.rows if row.ahead_to < row.known + self._lookahead(row)]
            if not drafting:
                yield self.inbox.arrival
                continue
            cost_s = self._world.scenario.drafter_turn_s(len(drafting), len(drafting))
            self.busy_s += cost_s
            yield self._world.env.timeout(cost_s)
            parcels: dict[_Inbox, list[Any]] = {}
            for row in drafting:
                row.ahead_to += 1
                parcels.setdefault(row.target.inbox, []).append(_Offer(row, row.known_branch, row.ahead_to))
            for inbox, batch in parcels.items():
                inbox.deliver(batch, self._world.scenario.link_s)

    def _lookahead(self, row: _Row) -> int:
        """Return the lookahead: a draft in verification, its bonus token and the next draft, within the answer."""
        γ = self._world.scenario.draft_length(len(row.target.rows) or 1)
        return min(2 * γ + 1 if γ else 0, self._world.scenario.answer_tokens - row.known - 1)

    def _receive(self) -> None:
        for batch in self.inbox.take():
            for message in batch:
                row = message.row
                if isinstance(message, _StepResult):
                    if message.branch != row.known_branch:
                        row.ahead_to = message.committed
                    row.known, row.known_branch = message.committed, message.branch
                    row.ahead_to = max(row.ahead_to, row.known)


class World:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.env = simpy.Environment()
        self.committed = 0
        self._random = random.Random(scenario.seed)
        self.coordinators = [_Coordinator(self) for _ in range(scenario.coordinators)]
        self.targets = [_Target(self) for _ in range(scenario.targets)]
        self.drafters = [_Drafter(self) for _ in range(scenario.drafters)]
        for stream in range(scenario.targets * scenario.streams):
            self._begin(self.coordinators[stream % scenario.coordinators])

    def draw_right(self) -> int:
        """Draw the number of right tokens in a chain of the drafter."""
        probability = self.scenario.acceptance
        if probability in (0.0, 1.0):
            return 0 if probability == 0.0 else self.scenario.answer_tokens
        return int(math.log(1 - self._random.random()) / math.log(probability))

    def finish(self, row: _Row) -> None:
        """End an answer, and start the next request of its coordinator."""
        if row.drafter is not None:
            row.drafter.rows.remove(row)
        self._begin(row.coordinator)

    def _begin(self, coordinator: _Coordinator) -> None:
        """Assign a request to the least loaded replicas. Prefill is not simulated."""
        target = min(self.targets, key=lambda target: len(target.rows))
        drafts = self.drafters and self.scenario.draft_length(1)
        drafter = min(self.drafters, key=lambda drafter: len(drafter.rows)) if drafts else None
        row = _Row(target, drafter, coordinator, self.scenario.answer_tokens, self.draw_right())
        row.expects = drafter is not None
        row.deadline_s = self.env.now
        target.rows.append(row)
        if len(target.rows) == 1:
            target.arrived.succeed()
            target.arrived = self.env.event()
        if drafter is not None:
            drafter.rows.append(row)
            drafter.inbox.deliver([_StepResult(row, 0, 0, finished=False)], 2 * self.scenario.link_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run, without the warm-up."""

    tokens_per_s: float
    target_use: float  # share of the time in which targets computed
    drafter_use: float
    coordinator_use: float


def simulate(scenario: Scenario, seconds: float, warm_up_s: float) -> Outcome:
    """Run a scenario. seconds: simulated, after the warm-up."""
    world = World(scenario)
    world.env.run(until=warm_up_s)
    began = _totals(world)
    world.env.run(until=warm_up_s + seconds)
    tokens, target_s, drafter_s, coordinator_s = (now - then for now, then in zip(_totals(world), began, strict=True))
    return Outcome(
        tokens / seconds,
        target_s / seconds / scenario.targets,
        drafter_s / seconds / scenario.drafters if scenario.drafters else 0.0,
        coordinator_s / seconds / scenario.coordinators,
    )


def _totals(world: World) -> tuple[float, float, float, float]:
    return (
        float(world.committed),
        sum(target.busy_s for target in world.targets),
        sum(drafter.busy_s for drafter in world.drafters),
        sum(coordinator.busy_s for coordinator in world.coordinators),
    )
