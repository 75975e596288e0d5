"""The contest between speculative and plain decoding, on a made-up machine."""

import random

import pytest

from actors.trial import SpeculationTrial

ROWS = 4


class Machine:
    """Steps with given times and tokens; counts what was used how often."""

    def __init__(self, trial: SpeculationTrial, *, spread: float = 0.0) -> None:
        self._trial = trial
        self._chance = random.Random(0)
        self._spread = spread
        self.seconds = 0.0
        self.tokens = 0

    def run(self, steps: int, *, plain_rate: float, speculative_rate: float, rows: int = ROWS) -> float:
        """Decode for so many steps; returns the share of the steps that were speculated."""
        speculated = 0
        for _ in range(steps):
            speculates = self._trial.speculates(rows)
            speculated += speculates
            tokens = rows * (3 if speculates else 1)
            seconds = tokens / (speculative_rate if speculates else plain_rate)
            seconds *= self._chance.uniform(1 - self._spread, 1 + self._spread)
            self._trial.note(rows, tokens, seconds, plain_rate=plain_rate, drafted=speculates)
            self.seconds += seconds
            self.tokens += tokens
        return speculated / steps


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_what_is_faster_is_used(spread: float) -> None:
    machine = Machine(SpeculationTrial(), spread=spread)
    machine.run(100, plain_rate=100, speculative_rate=70)
    assert machine.run(3000, plain_rate=100, speculative_rate=70) < 0.1
    machine = Machine(SpeculationTrial(), spread=spread)
    machine.run(100, plain_rate=100, speculative_rate=130)
    assert machine.run(3000, plain_rate=100, speculative_rate=130) > 0.85


def test_speculation_that_is_clearly_faster_is_never_interrupted() -> None:
    machine = Machine(SpeculationTrial())
    assert machine.run(5000, plain_rate=100, speculative_rate=200) == 1.0


@pytest.mark.parametrize("speculative_rate", [40, 80, 97, 103, 300])
def test_never_much_slower_than_plain(speculative_rate: float) -> None:
    """All trials together cost little of the time that plain decoding would have taken."""
    machine = Machine(SpeculationTrial(), spread=0.2)
    machine.run(10_000, plain_rate=100, speculative_rate=speculative_rate)
    assert machine.tokens / machine.seconds > 0.97 * 100


@pytest.mark.parametrize(("steps", "least"), [(100, 0.85), (300, 0.92)])
@pytest.mark.parametrize("step_s", [0.05, 0.2])
def test_finding_out_costs_little_in_a_run_of_seconds(steps: int, least: float, step_s: float) -> None:
    """Of the speed of plain decoding, where speculation would have taken a third away."""
    machine, plain_rate = Machine(SpeculationTrial(), spread=0.2), 32 / step_s
    machine.run(steps, plain_rate=plain_rate, speculative_rate=plain_rate / 1.5, rows=32)
    assert machine.tokens / machine.seconds > least * plain_rate


def test_bad_luck_with_few_tokens_ends_no_trial() -> None:
    """One row whose drafts are all right or all wrong; a step with a draft takes twice as long, and pays on average."""
    trial, chance, seconds, tokens = SpeculationTrial(), random.Random(0), 0.0, 0
    for _ in range(2000):
        speculates = trial.speculates(1)
        new = (5 if chance.random() < 0.4 else 1) if speculates else 1
        step_s = 0.04 if speculates else 0.02
        trial.note(1, new, step_s, plain_rate=50, drafted=speculates)
        seconds, tokens = seconds + step_s, tokens + new
    assert tokens / seconds > 1.2 * 50  # of 1.3


@pytest.mark.parametrize(("before", "after"), [(60, 150), (150, 60)])
def test_a_change_is_noticed(before: float, after: float) -> None:
    machine = Machine(SpeculationTrial(), spread=0.2)
    machine.run(3000, plain_rate=100, speculative_rate=before)
    machine.run(8000, plain_rate=100, speculative_rate=after)
    share = machine.run(2000, plain_rate=100, speculative_rate=after)
    assert share > 0.9 if after > 100 else share < 0.1


def test_sizes_of_batches_are_apart() -> None:
    machine = Machine(SpeculationTrial())
    machine.run(1000, plain_rate=100, speculative_rate=300, rows=1)
    machine.run(1000, plain_rate=100, speculative_rate=60, rows=16)
    assert machine.run(500, plain_rate=100, speculative_rate=300, rows=1) == 1.0
    assert machine.run(500, plain_rate=100, speculative_rate=60, rows=16) < 0.1
