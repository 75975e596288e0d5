"""Texts of the acceptance benchmark follow their verification rule."""

from collections.abc import Sequence

import pytest

from benchmarks.micro.acceptance import Pair, Row, as_text, roll_out, ways
from engine.model.runner import Runner
from tests.support.models import tiny_model

PROMPTS = ([1, 5, 9], [2, 7, 7, 8, 2, 7])


def runner(family: str) -> Runner:
    return Runner(tiny_model(family), slots=2, max_length=64, max_query=8)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(runner("llama"), runner("qwen3"), 0.7)


def texts(pair: Pair, name: str) -> Sequence[list[int]]:
    rows = [Row(number, prompt) for number, prompt in enumerate(PROMPTS)]
    finding = roll_out(pair, name, rows, draft_length=3, new_tokens=20)
    assert finding.steps + finding.accepted == sum(len(row.tokens) - row.prompt_length for row in rows)
    assert 0 <= finding.acceptance_rate <= 1
    assert f"{finding.acceptance_length:.2f}" in as_text([finding])
    return [row.tokens[: row.prompt_length + 20] for row in rows]


def test_coupled_texts_do_not_depend_on_drafts(pair: Pair) -> None:
    assert texts(pair, "coupled") == texts(pair, "coupled, looked up")


@pytest.mark.parametrize("name", [name for name in ways(64) if "coupled" not in name])
def test_every_way_runs(pair: Pair, name: str) -> None:
    assert all(len(text) == len(prompt) + 20 for text, prompt in zip(texts(pair, name), PROMPTS, strict=True))


@pytest.mark.parametrize("block", ["block", "rejection"])
def test_the_target_as_its_own_drafter_is_always_accepted(block: str) -> None:
    alike = Pair(runner("llama"), runner("llama"), 1.0)
    rows = [Row(number, prompt) for number, prompt in enumerate(PROMPTS)]
    finding = roll_out(alike, f"{block}, whole distribution", rows, draft_length=3, new_tokens=40)
    assert finding.acceptance_rate > 0.98
