"""Trials of speculative and plain decoding, on a simulated machine whose cores target and drafter share."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, repeat
from statistics import mean

import pytest

from actors.verifier.speculation_trial import SpeculationTrial


@dataclass(frozen=True)
class Load:
    """The time and the tokens of steps. A row's plain step commits one token."""

    rows: int | Callable[[], int] = 8
    plain_s: float = 0.04  # a plain step while drafters rest
    tokens: float = 2.0  # per row that a step with drafts commits, on average
    slowdown: float = 2.0  # of a step with drafts, over a plain one
    contention: float = 1.5  # of a plain step while drafters are at work
    reading_s: float = 0.0  # of a token that a drafter has missed; the target would need longer
    answer: int = 200  # tokens per row; drafters have missed no more
    hiccup: float = 1.0  # factor on all times, as other processes cause it

    @property
    def gain(self) -> float:
        """The speed of speculative over plain decoding."""
        return self.tokens / self.slowdown


PAYS = Load(tokens=3.0)
COSTS = Load(tokens=1.2)
LITTLE = Load(tokens=1.8)
ONE_ROW = Load(rows=1, plain_s=0.025, tokens=3.5, slowdown=1.2, contention=1.1)
MANY_ROWS = Load(rows=32, plain_s=0.07, tokens=1.4, slowdown=2.8)


class Machine:
    """Decodes in the mode that the trial chooses, and knows the speed of the better mode."""

    def __init__(
        self,
        *,
        seed: int = 0,
        spread: float = 0.2,
        start_error: float = 0.8,
        drafter_steps: int = 2,
        reads_beside: bool = False,
    ) -> None:
        """
        spread: relative deviation of step times.
        start_error: measured over true time of plain steps at the start.
        drafter_steps: steps that drafters take to catch up, and to come to rest.
        reads_beside: drafters catch up beside plain steps, instead of before the next step.
        """
        self._load = PAYS
        self.trial = SpeculationTrial(lambda rows: self._load.plain_s * self._known_factor)
        self._rng = random.Random(seed)
        self._spread, self._drafter_steps, self._reads_beside = spread, drafter_steps, reads_beside
        self._behind, self._busy = drafter_steps, 0  # steps until drafts come, and until drafters rest
        self._missed = 0  # tokens that drafters have to read
        self._known_factor = start_error
        self.seconds = self.speculated_s = self.best_s = 0.0

    def run(self, until_s: float, load: Load) -> float:
        """Decode until then. Returns the share of time that the better mode would have saved since the last call."""
        began_s, best_s, self._load = self.seconds, self.best_s, load
        while self.seconds < until_s:
            self._step(load)
        return 1 - (self.best_s - best_s) / (self.seconds - began_s)

    def _step(self, load: Load) -> None:
        rows = load.rows if isinstance(load.rows, int) else load.rows()
        speculates = self.trial.speculates(rows)
        drafted = speculates and self._behind == 0
        at_work = speculates or self._busy > 0
        missed = min(self._missed, load.answer * rows)
        reading_s = load.reading_s * missed
        behind = round(reading_s / load.plain_s) if self._reads_beside else 0
        self._behind = max(self._behind - 1, 0) if speculates else max(self._drafter_steps, behind)
        self._busy = self._drafter_steps if speculates else max(self._busy - 1, 0)
        per_row = load.tokens if drafted else 1.0
        tokens = sum(int(per_row) + (self._rng.random() < per_row % 1) for _ in range(rows))
        factor = load.slowdown if drafted else load.contention if at_work else 1.0
        seconds = load.plain_s * factor * self._rng.uniform(1 - self._spread, 1 + self._spread)
        seconds *= load.hiccup
        catch_up_s = (2 if self._reads_beside else 4) * reading_s
        seconds += reading_s * (speculates and not self._reads_beside)
        self._missed = 0 if speculates else missed + tokens
        work_s = tokens / rows * load.plain_s
        known_s = work_s * self._known_factor
        self.trial.note(rows, tokens, seconds, work_s=known_s, drafted=drafted, offered=at_work, catch_up_s=catch_up_s)
        if self.trial.is_resting:
            self._known_factor += 0.1 * (seconds / load.plain_s - self._known_factor)
        self.seconds += seconds
        self.speculated_s += speculates * seconds
        self.best_s += work_s / max(1.0, load.gain)


def losses(load: Load, *, drafter_steps: int = 2) -> tuple[float, float]:
    """Return the losses in the first half minute and in the five minutes after it, the mean of ten machines."""
    machines = [Machine(seed=seed, drafter_steps=drafter_steps) for seed in range(10)]
    return mean(machine.run(30, load) for machine in machines), mean(machine.run(330, load) for machine in machines)


@pytest.mark.parametrize("drafter_steps", [0, 2, 8])
@pytest.mark.parametrize("load", [PAYS, LITTLE, COSTS, ONE_ROW, MANY_ROWS, replace(PAYS, tokens=2.2)], ids=str)
def test_finding_out_costs_little_from_the_start(load: Load, drafter_steps: int) -> None:
    first, later = losses(load, drafter_steps=drafter_steps)
    assert first < (0.04 if drafter_steps < 8 else 0.05)
    assert later < (0.0125 if drafter_steps < 8 else 0.015)


@pytest.mark.parametrize("drafter_steps", [0, 2, 8])
@pytest.mark.parametrize(
    "load",
    [replace(COSTS, rows=rows, plain_s=plain_s) for rows, plain_s in ((1, 0.02), (8, 0.035), (32, 0.085), (64, 0.15))],
    ids=str,
)
def test_the_first_half_minute_is_about_as_fast_as_plain_decoding(load: Load, drafter_steps: int) -> None:
    """Where speculation is worth 0.6, with rows that all come at once."""
    machines = [Machine(seed=seed, drafter_steps=drafter_steps) for seed in range(10)]
    assert mean(machine.run(30, load) for machine in machines) < (0.02 if drafter_steps < 8 else 0.035)


@pytest.mark.parametrize(("rows", "plain_s"), [(1, 0.0065), (8, 0.0123), (32, 0.039)])
@pytest.mark.parametrize("worth", [0.75, 0.86, 0.95])
def test_ten_seconds_of_short_steps_are_about_as_fast_as_plain_decoding(
    rows: int, plain_s: float, worth: float
) -> None:
    """Steps of SmolLM2 in 4 bits on two cores, where drafts hardly pay."""
    load = Load(rows=rows, plain_s=plain_s, tokens=1.4, slowdown=1.4 / worth, contention=1.0)
    machines = [Machine(seed=seed, drafter_steps=0) for seed in range(5)]
    assert mean(machine.run(10, load) for machine in machines) < (0.02 if rows < 32 else 0.035)
    assert mean(machine.run(25, load) for machine in machines) < 0.0125


@pytest.mark.parametrize("reading_s", [0.0001, 0.0003, 0.001])
@pytest.mark.parametrize("rows", [8, 32])
def test_reading_what_drafters_have_missed_is_expected_to_cost_time(rows: int, reading_s: float) -> None:
    """Where drafts never pay, and drafters have missed up to 6400 tokens: between 0.6 and 6.4 s with 32 rows."""
    first, later = losses(replace(COSTS, rows=rows, plain_s=0.02 + 0.002 * rows, reading_s=reading_s))
    assert first < 0.03
    assert later < 0.0125


def test_speculation_that_pays_is_found_though_drafters_have_much_to_read() -> None:
    machine = Machine()
    load = replace(PAYS, rows=32, plain_s=0.085, reading_s=0.0003)
    machine.run(400, load)
    assert machine.run(460, load) < 0.03
    assert machine.trial.gain > 1.3


def test_a_trial_waits_for_drafters_that_catch_up_beside_plain_steps() -> None:
    """Its steps without drafts, up to 23 here, say nothing of the speed with drafts."""
    load = replace(PAYS, rows=32, plain_s=0.085, reading_s=0.0003)
    machines = [Machine(seed=seed, reads_beside=True) for seed in range(10)]
    for machine in machines:
        machine.run(400, load)
    assert mean(machine.run(460, load) for machine in machines) < 0.02


def draft_cost(rows: int) -> float:
    return STEP_S[2 * rows] / STEP_S[rows]


STEP_S = {1: 0.0105, 2: 0.0105, 4: 0.0115, 8: 0.0133, 16: 0.017, 32: 0.0276, 64: 0.044, 128: 0.08}  # by tokens


@pytest.mark.parametrize(
    ("rows", "acceptance", "begins"),
    [(2, 0.1, True), (8, 0.4, False), (8, 0.6, True), (16, 0.6, False), (32, 0.8, False), (32, 0.95, True)],
)
def test_drafts_that_cost_more_than_they_can_bring_are_not_hurried(rows: int, acceptance: float, begins: bool) -> None:
    """A step over twice as many tokens takes 1.15 times as long with 8 rows, and 1.6 times with 32."""
    trial = SpeculationTrial(STEP_S.__getitem__, draft_cost=draft_cost, acceptance=lambda: acceptance)
    assert trial.speculates(rows) == begins


def test_gains_are_inherited_by_what_drafts_cost_at_both_sizes() -> None:
    """What is worth 1.1 with 8 rows is worth less with 16, where verification costs more, and is not begun."""
    trial = SpeculationTrial(STEP_S.__getitem__, draft_cost=draft_cost)
    rng = random.Random(0)
    for _ in range(2000):
        speculates = trial.speculates(8)
        step_s = STEP_S[8] * (2 / 1.1 if speculates else 1) * rng.uniform(0.9, 1.1)
        tokens = 16 if speculates else 8
        trial.note(8, tokens, step_s, work_s=tokens / 8 * STEP_S[8], drafted=speculates, offered=speculates)
    assert trial.gain == pytest.approx(1.1, rel=0.06)
    assert not trial.speculates(16)
    assert trial.gain == pytest.approx(1.1 * (0.017 / 0.0133) / (0.0276 / 0.017), rel=0.06)


def test_drafts_return_at_once_when_the_load_falls() -> None:
    machine = Machine()
    machine.run(120, replace(MANY_ROWS, reading_s=0.0003))
    assert machine.run(150, replace(ONE_ROW, reading_s=0.0003)) < 0.06


@pytest.mark.parametrize("plain_s", [0.1, 0.4])
def test_drafts_so_good_that_the_plain_trial_is_broken_off_return_with_the_load(plain_s: float) -> None:
    few, many = replace(ONE_ROW, plain_s=plain_s), replace(COSTS, plain_s=plain_s)
    machines = [Machine(seed=seed) for seed in range(10)]
    for machine in machines:
        machine.run(60, few)
        machine.run(120, many)
    assert mean(machine.run(180, few) for machine in machines) < 0.05


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_speculation_that_pays_is_found_soon(rows: int) -> None:
    """Within 100 s with 64 rows, whose trial costs most."""
    load = replace(PAYS, rows=rows, plain_s=0.02 + 0.002 * rows)
    machine = Machine()
    machine.run(100, load)
    assert machine.run(160, load) < 0.03
    assert machine.speculated_s > 40


def test_slow_steps_cost_no_more_than_a_trial() -> None:
    """At 0.2 s a step the first trial alone takes a second or two."""
    first, later = losses(replace(MANY_ROWS, plain_s=0.2, slowdown=2.1))
    assert first < 0.06
    assert later < 0.015


def test_one_row_begins_with_drafts_however_slow_its_steps_are() -> None:
    trial = SpeculationTrial(lambda rows: 0.5)
    assert trial.speculates(1)
    assert not trial.speculates(32)


@pytest.mark.parametrize(("plain_s", "most"), [(0.1, 0.02), (0.4, 0.04), (0.8, 0.06)])
@pytest.mark.parametrize("load", [ONE_ROW, replace(ONE_ROW, tokens=1.5)], ids=str)
def test_one_slow_row_goes_on_with_drafts_that_pay(load: Load, plain_s: float, most: float) -> None:
    """Though the drafter takes two steps until it drafts."""
    machines = [Machine(seed=seed) for seed in range(10)]
    assert mean(machine.run(60, replace(load, plain_s=plain_s)) for machine in machines) < most


def test_sizes_that_alternate_count_as_one() -> None:
    rng = random.Random(0)
    first, later = losses(replace(MANY_ROWS, rows=lambda: rng.choice([26, 29, 30, 31, 32])))
    assert first < 0.04
    assert later < 0.0125


@pytest.mark.parametrize("start_error", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("load", [PAYS, COSTS], ids=["pays", "costs"])
def test_a_wrong_estimate_of_plain_steps_does_no_harm(load: Load, start_error: float) -> None:
    machine = Machine(start_error=start_error)
    assert machine.run(30, load) < 0.05
    assert machine.run(330, load) < 0.015


def test_drafters_that_are_still_at_work_do_not_make_plain_decoding_look_slow() -> None:
    """After a change to plain decoding, steps are as slow as those with drafts until the drafters rest."""
    load = Load(tokens=1.4, slowdown=1.6, contention=1.6)
    machine = Machine(drafter_steps=8)
    machine.run(60, load)
    assert machine.trial.gain <= 1.0  # it may have had no time to show
    assert machine.run(120, load) < 0.03


@pytest.mark.parametrize(
    ("before", "after", "most"),
    [(PAYS, COSTS, 0.06), (COSTS, PAYS, 0.25), (ONE_ROW, MANY_ROWS, 0.06), (MANY_ROWS, ONE_ROW, 0.06)],
)
def test_a_change_of_load_is_noticed(before: Load, after: Load, most: float) -> None:
    """A change is noticed within a minute. While plain decoding is in use, only a trial every half minute can tell.

    most: the share of that minute that is lost, at most.
    """
    machines = [Machine(seed=seed) for seed in range(10)]
    for machine in machines:
        machine.run(100, before)
    assert mean(machine.run(160, after) for machine in machines) < most
    assert mean(machine.run(360, after) for machine in machines) < 0.0125


@pytest.mark.parametrize("rows", [4, 16])
def test_drafts_that_cost_a_little_since_the_load_changed_are_found_out_soon(rows: int) -> None:
    """Such as sampled texts after greedy ones. Of the 10 % that they cost, most is saved within 15 s.

    Times differ more than the speeds here, so that it takes several trials.
    """
    before = Load(rows=rows, plain_s=0.025, tokens=2.6, slowdown=2.0, contention=1.0)
    machines = [Machine(seed=seed, spread=0.35) for seed in range(10)]
    for machine in machines:
        machine.run(100, before)
    assert mean(machine.run(115, replace(before, tokens=1.8)) for machine in machines) < 0.04


def test_drafts_that_pay_with_fewer_rows_are_soon_compared_with_more() -> None:
    """The next size inherits them. There they may cost too little to be seen without a trial."""
    fewer = Load(rows=32, plain_s=0.07, tokens=1.3, slowdown=1.25)
    more = Load(rows=64, plain_s=0.11, tokens=1.1, slowdown=1.2)
    machines = [Machine(seed=seed) for seed in range(10)]
    for machine in machines:
        machine.run(60, fewer)
    assert mean(machine.run(85, more) for machine in machines) < 0.04


@pytest.mark.parametrize("load", [PAYS, COSTS], ids=["pays", "costs"])
def test_a_slower_machine_changes_no_verdict(load: Load) -> None:
    machine = Machine()
    machine.run(60, load)
    assert machine.run(120, replace(load, plain_s=3 * load.plain_s)) < 0.04


def test_what_trials_cost_is_counted() -> None:
    machine = Machine(spread=0.0)
    lost = 300 * machine.run(300, COSTS)
    assert machine.trial.lost_s == pytest.approx(lost, rel=0.3)
    assert machine.trial.gain == pytest.approx(COSTS.gain, rel=0.1)


def test_long_runs_end_well() -> None:
    """Pauses grow for hours if all trials agree."""
    machine = Machine(spread=0.0)
    machine.run(300_000, replace(PAYS, tokens=2.05, plain_s=2.0))
    assert machine.trial.trials > 600
    assert machine.trial.lost_s < 0.0125 * machine.seconds


def test_a_hiccup_during_a_trial_does_not_end_trials() -> None:
    machine = Machine()
    machine.run(60, COSTS)
    while not machine.trial.is_trying:
        machine.run(machine.seconds + 0.01, COSTS)
    machine.run(machine.seconds + 1, replace(COSTS, plain_s=20.0))
    machine.run(machine.seconds + 200, PAYS)
    assert machine.trial.gain > 1.3


@pytest.mark.parametrize(("share", "hiccup_s"), [(0.03, 0.15), (0.01, 0.5)])
def test_hiccups_of_the_machine_do_not_end_speculation_that_pays(share: float, hiccup_s: float) -> None:
    """One row, whose drafts are worth 1.6. Time that hiccups take is not counted."""

    def speed(seed: int) -> float:
        """Return the speed over plain decoding in the first ten seconds."""
        trial, rng, seconds, plain_s = SpeculationTrial(lambda rows: 0.01), random.Random(seed), 0.0, 0.0
        while seconds < 10:
            speculates = trial.speculates(1)
            tokens = 1 + (rng.random() < 0.75) if speculates else 1
            step_s = 0.015 * (1.75 / 1.6 if speculates else 1) * rng.uniform(0.85, 1.15)
            stolen_s = hiccup_s * (rng.random() < share)
            trial.note(1, tokens, step_s + stolen_s, work_s=tokens * 0.01, drafted=speculates, offered=speculates)
            seconds, plain_s = seconds + step_s, plain_s + tokens * 0.015
        return plain_s / seconds

    assert mean(speed(seed) for seed in range(20)) > 1.55


@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize(("rows", "plain_s"), [(1, 0.0087), (8, 0.023)])
@pytest.mark.parametrize("worth", [0.85, 1.3])
def test_a_slow_moment_in_a_trial_is_soon_corrected(worth: float, rows: int, plain_s: float, speculates: bool) -> None:
    """Such as 0.3 s in which all steps take twice as long, from the beginning of the first trial of a mode."""
    load = Load(rows=rows, plain_s=plain_s, tokens=1.8, slowdown=1.8 / worth, contention=1.0)
    machines = [Machine(seed=seed, drafter_steps=0, spread=0.08, start_error=1.0) for seed in range(10)]
    for machine in machines:
        while machine.seconds < 140 and not (machine.trial.is_trying and machine.trial.speculates(rows) == speculates):
            machine.run(machine.seconds + 0.001, load)
        machine.run(machine.seconds + 0.3, replace(load, hiccup=2.0))
    assert mean(machine.run(machine.seconds + 30, load) for machine in machines) < 0.025


def test_steps_in_which_no_proposer_was_at_work_end_no_trial() -> None:
    """Short structured answers: all steps take twice as long as was measured at the start, few have drafts."""
    trial = SpeculationTrial(lambda rows: 0.01)
    for step in range(200):
        assert trial.speculates(1)
        drafted = step % 20 == 19
        tokens = 2 if drafted else 1
        trial.note(1, tokens, 0.02, work_s=tokens * 0.01, drafted=drafted, idle=not drafted)


def test_what_the_first_step_waits_for_is_no_loss_of_its_drafts() -> None:
    trial = SpeculationTrial(lambda rows: 0.01)
    for step in range(20):
        assert trial.speculates(1)
        trial.note(1, 2, 0.014 if step else 2.0, work_s=0.02, drafted=True)


def test_slow_steps_are_no_hiccups_although_much_is_accepted() -> None:
    """Steps with drafts take six times as long as plain ones, and commit nine tokens or one: worth 0.9."""
    trial, rng, seconds, plain_s, speculated_s = SpeculationTrial(lambda rows: 0.01), random.Random(0), 0.0, 0.0, 0.0
    while seconds < 60:
        speculates = trial.speculates(1)
        tokens = (9 if rng.random() < 0.55 else 1) if speculates else 1
        step_s = 0.01 * (6 if speculates else 1) * rng.uniform(0.85, 1.15)
        trial.note(1, tokens, step_s, work_s=tokens * 0.01, drafted=speculates, offered=speculates)
        seconds, plain_s = seconds + step_s, plain_s + tokens * 0.01
        speculated_s += speculates * step_s
    assert plain_s / seconds > 0.97
    assert speculated_s < 0.3 * seconds


def test_bad_luck_with_few_tokens_ends_no_trial() -> None:
    """A row's drafts are all right or all wrong. A step with a draft takes twice as long, and pays on average."""
    trial, rng, seconds, tokens = SpeculationTrial(lambda rows: 0.02), random.Random(0), 0.0, 0
    for _ in range(4000):
        speculates = trial.speculates(1)
        new = (5 if rng.random() < 0.4 else 1) if speculates else 1
        step_s = 0.04 if speculates else 0.02
        trial.note(1, new, step_s, work_s=new * 0.02, drafted=speculates)
        seconds, tokens = seconds + step_s, tokens + new
    assert tokens / seconds > 1.2 * 50  # of 1.3


@pytest.mark.parametrize("steps", [4, 12, 30, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (8, 16))])
@pytest.mark.parametrize("sizes", [(8, 32), (2, 16), (4, 16, 64)], ids=str)
def test_speculation_is_judged_although_sizes_alternate(sizes: Sequence[int], steps: int) -> None:
    """Where each size lasts for a few steps only."""

    def run(load: Load, seed: int) -> float:
        rows = chain.from_iterable(repeat(size, steps) for size in cycle(sizes))
        machine = Machine(seed=seed)
        load = replace(load, rows=lambda: next(rows))
        machine.run(60, load)
        return machine.run(360, load)

    assert mean(run(COSTS, seed) for seed in range(10)) < 0.0125
    assert mean(run(PAYS, seed) for seed in range(10)) < 0.0125
