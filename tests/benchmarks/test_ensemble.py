"""The findings of the ensemble benchmark."""

from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordinator.request import Statistics
from benchmarks.micro.ensemble import as_text, find
from benchmarks.peers.contestant import Activity, Text
from decoding.sampling.params import SamplingParams


def record(name: str, speeds: list[float], answer: list[int]) -> Any:
    return SimpleNamespace(
        contestant=SimpleNamespace(name=name),
        tokens_per_s=speeds,
        texts=[Text([1], answer, SamplingParams(max_tokens=2))],
        activity=Activity(Statistics(steps=1, drafted=4, accepted=2, committed=3)),
    )


def test_costs_are_beside_the_slowest_member_of_each_repetition() -> None:
    findings = find(
        [
            record("a alone", [10, 30], [1]),
            record("b alone", [20, 15], [2]),
            record("ensemble, plain", [5, 10], [3, 4]),
            record("ensemble, speculated, γ = 4", [20, 20], [3, 4]),
        ]
    )
    assert [finding["cost"] for finding in findings] == [[1, 0.5], [0.5, 1], [2, 1.5], [0.5, 0.75]]
    assert findings[3]["speed_up"] == [4, 2]
    assert findings[3]["same_text"] is True
    assert findings[3]["acceptance_rate"] == pytest.approx(0.5)
    assert "3.00 (2.00–4.00)" in as_text(findings)
