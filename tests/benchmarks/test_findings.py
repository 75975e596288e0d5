"""Ratios, limits, tables and figure of made-up records."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from actors.coordinator.request import Statistics
from actors.loops.thread import LoopTimes
from benchmarks.findings import (
    Comparison,
    Sameness,
    as_text,
    find_doubts,
    first_difference,
    median_times,
    score,
    speculation,
)
from benchmarks.peers.contestant import Activity, Contestant, Kind, Record
from benchmarks.peers.replica import Times
from benchmarks.report import Curve, Panel, draw, write

TIMES = Times(
    plain={1: 0.030, 2: 0.031, 3: 0.033, 5: 0.036}, target={1: 0.032, 2: 0.033, 3: 0.036, 5: 0.040}, draft_step_s=0.010
)
AGREEMENT = [torch.tensor([True, True, False, True] * 5)]


def record(name: str, kind: Kind, rates: list[float], *, draft_length: int | None = None) -> Record:
    activity = Activity(
        Statistics(steps=10, drafted=20, accepted=10, committed=20),
        LoopTimes(steps=10, step_s=0.4, prefill_s=0.1, waited_s=0.5),
        LoopTimes(steps=20, step_s=0.2),
    )
    contestant = Contestant(name, "test", kind, draft_length=draft_length)
    return Record(contestant, rates, activity=activity if kind in ("fixed", "adaptive", "alternation") else Activity())


def records() -> list[Record]:
    return [
        record("HF", "hf", [10.0, 20.0, 10.0]),
        record("HF assisted", "hf-assisted", [11.0, 22.0, 11.0], draft_length=4),
        record("HF assisted", "hf-assisted", [9.0, 18.0, 9.0], draft_length=8),
        record("Consort", "plain", [10.0, 20.0, 20.0]),
        record("Consort", "fixed", [15.0, 30.0, 30.0], draft_length=2),
        record("Consort", "adaptive", [20.0, 40.0, 40.0]),
    ]


def comparison() -> Comparison:
    measured = records()
    sameness = Sameness(texts=3, different=1, share=0.9, largest_gap=0.01)
    scores = score(measured, lambda record: sameness if record.contestant.kind != "hf" else None)
    speculations = [speculation(drafting, measured[3], AGREEMENT, TIMES) for drafting in measured[4:]]
    return Comparison(0.0, 1, scores, speculations, {"Consort": TIMES}, ["t_1 is odd"])


def test_ratios_are_medians_of_pairs_and_the_best_assisted_is_the_reference() -> None:
    scores = comparison().scores
    assert scores[4].ratios == pytest.approx({"hf": 1.5, "hf-assisted": 15 / 11, "plain": 1.5})
    assert "vllm" not in scores[0].ratios


def test_a_fixed_draft_length_is_held_against_its_own_limit() -> None:
    fixed = comparison().speculations[0]
    assert fixed.limits.tokens_per_step == 18 / 8  # steps of 3, 3, 1, 3, 1, 3, 1 and 3 tokens, counted by hand
    assert fixed.hidden_limit == pytest.approx(18 / 8 * 0.030 / 0.036)
    assert fixed.alternating_limit == pytest.approx(18 / 8 * 0.030 / (2 * 0.010 + 0.036))
    assert fixed.speed_up == pytest.approx(1.5)
    assert fixed.of_limit == pytest.approx(1.5 / fixed.hidden_limit)
    assert fixed.agreement == pytest.approx(0.75)
    assert fixed.acceptance_rate == pytest.approx(0.5)
    assert fixed.acceptance_length == pytest.approx(2.0)
    assert fixed.verify_step_s == pytest.approx(0.04)
    assert fixed.draft_step_s == pytest.approx(0.01)
    assert fixed.waited_share == pytest.approx(0.5)


def test_adaptive_drafting_is_held_against_the_best_of_all_limits() -> None:
    fixed, adaptive = comparison().speculations
    assert adaptive.hidden_limit >= fixed.hidden_limit
    assert adaptive.limits.draft_length in (1, 2, 4)


def test_the_tables_and_the_json_hold_the_findings(tmp_path: Path) -> None:
    text = as_text(comparison())
    assert "Consort, test" in text
    assert "90.0%" in text
    assert "S and S* are unreliable: t_1 is odd" in text
    assert "× best assisted" in text
    path = tmp_path / "deeper" / "found.json"
    write(path, "benchmarks", {"threads": 4}, comparisons=[asdict(comparison())], left_out=["vLLM"])
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["options"] == {"threads": 4}
    assert result["left_out"] == ["vLLM"]
    scores = result["comparisons"][0]["scores"]
    assert scores[4]["activity"]["target"]["steps"] == 10
    assert result["comparisons"][0]["times"]["Consort"]["target"]["5"] == 0.040


def test_one_disturbed_repetition_changes_no_time_but_is_reported() -> None:
    disturbed = replace(TIMES, plain=TIMES.plain | {1: 0.216})
    ran = LoopTimes(steps=100, step_s=2.5)
    assert median_times([disturbed, TIMES, TIMES]) == TIMES
    assert find_doubts([{"Consort": TIMES}] * 3, ran) == []
    assert find_doubts([{"Consort": times} for times in (TIMES, disturbed, TIMES)], ran) == [
        "Consort: t_1 went from 30.0 to 216.0 ms"
    ]


def test_a_time_that_plain_decoding_did_not_have_is_doubted() -> None:
    ran = LoopTimes(steps=100, step_s=2.5)
    assert find_doubts([{"Consort": replace(TIMES, plain={1: 0.216})}], ran) == [
        "Consort: t_1 is 216.0 ms alone, but 25.0 ms as it ran"
    ]


def test_a_figure_has_curves_with_ranges_and_levels(tmp_path: Path) -> None:
    path = tmp_path / "found.png"
    curves = [Curve("over γ", [2, 4], [15.0, 20.0], [(14, 16), (18, 21)]), Curve("plain", [], [10.0], style="--")]
    draw([[Panel("one", "γ", curves)], [Panel("another", "γ", curves, log=True)]], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("answer", "index"), [([1, 2, 3], None), ([1, 2, 4], 2), ([0, 2, 3], 0)])
def test_the_first_difference(answer: list[int], index: int | None) -> None:
    assert first_difference(answer, [1, 2, 3]) == index
