"""The simulator against results worked out by hand."""

from typing import Any

import pytest

from benchmarks.scaling.__main__ import Study, TurnCosts
from benchmarks.scaling.simulator import Outcome, Scenario, simulate


def run(**given: Any) -> Outcome:
    usual = {
        "draft_length": lambda _: 4,
        "acceptance": 0.8,
        "target_turn_s": lambda rows, tokens: 0.01,
        "drafter_turn_s": lambda rows, tokens: 1e-5,
        "link_s": 1e-6,
    }
    return simulate(Scenario(**{**usual, **given}), seconds=20, warm_up_s=1)


def test_plain_decoding_commits_a_token_per_row_and_turn() -> None:
    outcome = run(draft_length=lambda _: 0, drafters=0, streams=4, answer_tokens=100)
    assert outcome.tokens_per_s == pytest.approx(400, rel=0.01)
    assert outcome.target_use == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_hidden_drafts_commit_what_leviathan_et_al_expect(acceptance: float) -> None:
    """(1 - α^(γ+1)) / (1 - α) tokens per turn, arXiv 2211.17192, equation 1; 2,000 turns."""
    outcome = run(acceptance=acceptance, answer_tokens=10**6)
    assert outcome.tokens_per_s == pytest.approx(100 * sum(acceptance**k for k in range(5)), rel=0.05)


def test_a_drafter_in_turn_with_its_target() -> None:
    """If every token differs from the draft, no run-ahead is usable, and the target waits at most a turn."""
    outcome = run(acceptance=0.0, drafter_turn_s=lambda rows, tokens: 0.002)
    assert 1 / 0.02 <= outcome.tokens_per_s <= 1 / 0.01


def test_a_drafter_that_is_too_far_away_costs_little() -> None:
    plain = run(draft_length=lambda _: 0, drafters=0)
    assert run(link_s=0.5, answer_tokens=10**6).tokens_per_s >= 0.9 * plain.tokens_per_s


def test_two_targets_are_twice_one() -> None:
    single, double = run(streams=4), run(streams=4, targets=2, drafters=2)
    assert double.tokens_per_s == pytest.approx(2 * single.tokens_per_s, rel=0.05)


def test_a_coordinator_has_its_limit() -> None:
    given = {"draft_length": lambda _: 0, "drafters": 0, "targets": 10, "coordinator_verdict_s": 0.01}
    outcome = run(**given, answer_tokens=1)
    assert outcome.tokens_per_s == pytest.approx(100, rel=0.1)
    assert outcome.coordinator_use == pytest.approx(1.0, rel=0.1)
    assert run(**given, answer_tokens=1, coordinators=10).tokens_per_s > 300


def test_the_same_seed_gives_the_same_run() -> None:
    assert run(seed=3) == run(seed=3)
    assert run(seed=3) != run(seed=4)


def test_costs_lie_on_lines_between_what_was_measured() -> None:
    costs = TurnCosts({1: {1: 1.0, 5: 3.0}, 4: {1: 2.0, 5: 6.0}})
    assert costs(1, 1) == 1.0
    assert costs(1, 3) == 2.0
    assert costs(4, 20) == 6.0
    assert costs(2, 2) == pytest.approx(1 + 1 / 3)
    assert costs(7, 7) == pytest.approx(3.0)
    assert TurnCosts({1: {1: 1.0}})(3, 3) == 1.0


def test_a_study_reads_costs_as_json_has_them() -> None:
    pair = {"target_turn_s": {"1": {"1": 0.01, "5": 0.011}}, "drafter_turn_s": {"1": {"1": 0.001}}, "acceptance": 0.9}
    study = Study("pair", {"pairs": {"pair": pair}, "coordinator_times": {"batch_s": 1e-4, "verdict_s": 1e-5}})
    assert study.draft_length(1) == 4  # drafts cost next to nothing
    assert study.draft_length(0) == 0
