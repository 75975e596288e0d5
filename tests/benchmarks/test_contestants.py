"""Every contestant writes the text of an independent reference. Speed is not tested."""

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.findings import run_comparison
from benchmarks.peers import contestant as turns
from benchmarks.peers import vllm_worker
from benchmarks.peers.consort import in_threads, measure_times
from benchmarks.peers.contestant import Contestant, Workload
from benchmarks.peers.huggingface import HuggingFace, HuggingFaceContestant
from benchmarks.processes import Local
from engine.model.runner import Runner
from tests.support import reference
from tests.support.models import tiny_model

PROMPTS = [[5, 9, 31, 7], [1, 2, 3], [60, 8, 8, 8, 8, 14, 2], [33]]
GREEDY = Workload(PROMPTS, new_tokens=17, streams=3)
SAMPLED = Workload(PROMPTS, new_tokens=17, temperature=0.8, streams=3)


def expected(workload: Workload) -> list[list[int]]:
    params = [workload.params(index) for index in range(len(workload.prompts))]
    return reference.generate(tiny_model("llama-gqa"), workload.prompts, params)


def runner(family: str) -> Runner:
    return Runner(tiny_model(family), slots=3, max_length=192, max_query=32)


@pytest.mark.parametrize("workload", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_alternation(workload: Workload) -> None:
    target = runner("llama-gqa")
    with in_threads(target, {"Consort": lambda: runner("llama-gqa")}, draft_lengths=[1, 4], most=4) as ours:
        alternating = [contestant for contestant in ours if contestant.kind == "alternation"]
        assert [contestant.name for contestant in alternating] == ["alternation, γ = 1", "alternation, γ = 4"]
        for contestant in alternating:
            assert contestant.run(workload) == expected(workload)
            activity = contestant.activity()
            assert activity.statistics.committed == 17 * len(PROMPTS)
            assert activity.statistics.accepted == activity.statistics.drafted > 0
            assert contestant.activity().statistics.steps == 0


@pytest.mark.parametrize("draft_length", [None, 4])
def test_hugging_face(draft_length: int | None) -> None:
    models = Local(HuggingFace(tiny_model("llama-gqa"), tiny_model("llama")))
    one_by_one = Workload(PROMPTS, new_tokens=17)
    assisted = HuggingFaceContestant(models, assisted=True, draft_length=draft_length)
    assert assisted.run(one_by_one) == expected(one_by_one)
    assert HuggingFaceContestant(models).run(GREEDY) == expected(GREEDY)
    assert not assisted.takes_part(GREEDY)
    assert assisted.takes_part(one_by_one)


@pytest.mark.parametrize("workload", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_whole_comparison(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_SETTLING_S", 0.0)
    models = Local(HuggingFace(tiny_model("llama-gqa"), tiny_model("llama")))
    with in_threads(runner("llama-gqa"), {"Consort": lambda: runner("llama")}, draft_lengths=[2], most=3) as ours:
        contestants: Sequence[Contestant] = [HuggingFaceContestant(models), *ours]
        comparison = run_comparison(
            contestants,
            workload,
            models=models,
            measure=lambda: {"Consort": measure_times(ours[0], ours[2], streams=2, draft_lengths=[1, 2, 3])},
            repetitions=2,
            prompts=2,
            report=lambda line: None,
        )
    assert all(len(score.tokens_per_s) == 2 for score in comparison.scores)
    assert [score.name for score in comparison.scores] == [
        "HF, plain",
        "Consort, plain",
        "alternation, γ = 2",
        "Consort, γ = 2",
        "Consort, adaptive, γ ≤ 3",
    ]
    for score in comparison.scores[1:]:
        assert score.sameness is not None
        assert score.sameness.share == 1.0
        assert score.activity.statistics.committed == 2 * 2 * 17
    assert (comparison.scores[0].sameness is None) == (workload is SAMPLED)
    assert [speculation.name for speculation in comparison.speculations] == [
        "alternation, γ = 2",
        "Consort, γ = 2",
        "Consort, adaptive, γ ≤ 3",
    ]
    assert comparison.speculations[0].limits.draft_length == 2


def test_the_gap_tells_ties_from_errors() -> None:
    models = HuggingFace(tiny_model("llama-gqa"), tiny_model("llama"))
    for workload in (GREEDY, SAMPLED):
        for index, (prompt, answer) in enumerate(zip(PROMPTS, expected(workload), strict=True)):
            others = [models.gap(prompt, answer, other, workload.params(index)) for other in range(64)]
            assert min(others) >= -1e-4
            assert max(others) > 1


def test_the_worker_of_vllm_answers_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeModel:
        def __init__(self, **options: Any) -> None:
            assert options["model"] == "folder"

        def generate(self, prompts: list[dict[str, list[int]]], params: Any, **options: Any) -> list[Any]:
            ids = [prompt["prompt_token_ids"][:1] * params.max_tokens for prompt in prompts]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(answer))]) for answer in ids]

    fake = SimpleNamespace(LLM=FakeModel, SamplingParams=SimpleNamespace, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    setup = {"model": "folder", "dtype": "float32", "streams": 2}
    question = {"prompts": [[7, 1], [8, 2]], "max_tokens": 3, "temperature": 0.0}
    answers = vllm_worker.decode(iter((setup, question)))
    assert list(answers) == [{"version": "0"}, {"answers": [[7, 7, 7], [8, 8, 8]]}]
