"""Graphs that compute something else than calls are detected."""

from functools import cache

from benchmarks.comparison.gpu_checks import check_graphs
from engine.model.runner import Runner
from tests.support.models import tiny_model

PROMPTS = [[5, 6, 7], [9, 10, 11, 12]]


def runner(*, stale: bool) -> Runner:
    """stale: replays return the results of the first call, like a graph that reads the wrong memory."""
    made = Runner(tiny_model("llama-gqa"), slots=2, max_length=80, max_query=32)
    made.use_graphs(capture=cache if stale else lambda run: run)
    return made


def test_the_same_with_graphs_and_without() -> None:
    checks = check_graphs(runner(stale=False), runner(stale=False), PROMPTS)
    assert checks.passed
    assert min(checks.single_ms, checks.chain_ms) > 0


def test_stale_replays_are_noticed() -> None:
    checks = check_graphs(runner(stale=True), runner(stale=False), PROMPTS)
    assert not checks.same_text
    assert checks.same_drafts
