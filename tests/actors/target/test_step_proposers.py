"""Which proposers are asked before a step: the set that is fastest, within a few percent of the time."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.target.step_proposers import StepProposers
from decoding.drafts.trie import ProposerName

STEP_S = 0.04
STEPS = 6_000
LENGTH = 4


class Simulated:
    """A proposer that has the text's next tokens with some probability each."""

    def __init__(self, name: ProposerName, rate: float, seconds: float, *, planned: bool = False) -> None:
        self.name, self.rate, self.seconds, self.planned = name, rate, seconds, planned
        self.log: list[Simulated] = []  # shared by all, in the order in which they are asked

    def drafts_for(self, row: Any) -> bool:
        return True

    def draft(self, rows: Sequence[Any]) -> float:
        self.log.append(self)
        return self.seconds


def speed(proposers: Sequence[Simulated], *, overlap: float, adaptive: bool) -> float:
    """Return tokens per second. overlap: how often two proposers are right about the same tokens."""
    chosen, rng = StepProposers(proposers, adaptive=adaptive), random.Random(0)
    rows: Any = [SimpleNamespace()]
    asked: list[Simulated] = []
    for each in proposers:
        each.log = asked
    tokens = seconds = 0.0
    for _ in range(STEPS):
        asked.clear()
        chosen.draft(rows, STEP_S)
        path: list[ProposerName] = []
        for _ in range(LENGTH):
            shared = rng.random()
            draws = {each.name: shared if rng.random() < overlap else rng.random() for each in proposers}
            right = [each.name for each in asked if draws[each.name] < each.rate]
            if not right:
                break
            path.append(right[0])
        seconds += STEP_S + sum(each.seconds for each in asked)
        tokens += 1 + len(path)
        draft: Any = SimpleNamespace(proposers=path)
        verdict: Any = SimpleNamespace(path=range(len(path)))
        verification: Any = SimpleNamespace(row=rows[0], draft=draft)
        chosen.learn([verification], [verdict])
    return tokens / seconds


@pytest.mark.parametrize("overlap", [0.0, 0.8])
@pytest.mark.parametrize(
    ("drafter", "heads"),
    [
        ((0.6, 0.017), (0.55, 0.004)),
        ((0.8, 0.01), (0.3, 0.01)),
        ((0.5, 0.002), (0.5, 0.002)),
        ((0.1, 0.03), (0.1, 0.03)),
    ],
)
def test_a_mixture_is_as_fast_as_the_best_of_its_parts(
    drafter: tuple[float, float], heads: tuple[float, float], overlap: float
) -> None:
    def proposers() -> list[Simulated]:
        return [Simulated("drafter", *drafter), Simulated("eagle3", *heads)]

    alone = [speed([each], overlap=overlap, adaptive=False) for each in proposers()]
    both = speed(proposers(), overlap=overlap, adaptive=False)
    assert speed(proposers(), overlap=overlap, adaptive=True) >= 0.97 * max(*alone, both, 1 / STEP_S)


def test_a_planned_proposer_is_always_asked_if_it_is_the_only_one() -> None:
    useless = Simulated("drafter", 0.0, 0.04, planned=True)
    assert speed([useless], overlap=0.0, adaptive=True) == pytest.approx(0.5 / STEP_S)
