"""MTP layers draft for their own target, and change no text: greedy, sampled, alone, in company, after preemption."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.drafts.options import NgramOptions
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.heads.spec import HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_with_heads
from engine.model.runner import Runner
from tests.families.configurations import VOCAB
from tests.support.mtp import FAMILIES, make_mtp
from tests.support.waiting import wait_until

PLAIN = Endpoint("plain", "target", None, 0, decode=str)
DRAFTED = Endpoint("drafted", "target", None, 4, decode=str, heads="mtp")
TOGETHER = Endpoint("together", "target", None, 4, decode=str, heads="mtp", ngram=NgramOptions())
SAMPLE = {"qwen3_5"}  # its layers carry a state, so it verifies chains
PARAMS = [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in FAMILIES]
HOW = [
    pytest.param(temperature, dtype, marks=[] if (temperature, dtype) == (0.8, "bfloat16") else pytest.mark.slow)
    for temperature in (0.0, 0.8)
    for dtype in ("float32", "bfloat16")
]


def load(folder: Path, **options: Any) -> tuple[Runner, Any]:
    sizes: dict[str, Any] = {"slots": 4, "max_length": 96, "prefill_chunk": 32, "threads": 1}
    spec = ModelSpec(name="m", path=str(folder), device="cpu", **sizes | options)
    heads = HeadsSpec(name="h", path=str(folder), kind="mtp", min_acceptance=0)
    runner, _, proposer = load_with_heads(spec, heads)
    return runner, proposer


@contextmanager
def running(folder: Path, *, targets: int = 1, **options: Any) -> Iterator[Engine]:
    replicas: dict[str, tuple[Role, Runner]] = {}
    own: dict[str, LoopOptions] = {}
    for index in range(targets):
        runner, heads = load(folder, **options)
        name = "target" if index == 0 else f"target#{index}"
        replicas[name] = ("target", runner)
        own[name] = LoopOptions(adaptive=False, heads=heads, prefill_chunk=32)
    with Engine(replicas, own_options=own) as engine:
        yield engine


def requests(endpoint: Endpoint, **params: Any) -> list[Request]:
    prompts = [[(5 * seed + 7 * position) % VOCAB for position in range(9 + 5 * seed)] for seed in range(6)]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24} | params
    return [Request(endpoint, prompt, SamplingParams(seed=seed, **options)) for seed, prompt in enumerate(prompts)]


def tokens(answers: Sequence[list[Delta]]) -> list[list[int]]:
    return [[token for delta in answer for token in delta.token_ids] for answer in answers]


def total(answers: Sequence[list[Delta]], count: str) -> int:
    return sum(getattr(answer[-1].statistics, count) for answer in answers)


@pytest.fixture(scope="module", params=PARAMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_mtp(request.param, path)
    return path


@pytest.mark.parametrize(("temperature", "dtype"), HOW)
def test_texts_are_the_same_alone_in_company_and_after_preemption(folder: Path, temperature: float, dtype: str) -> None:
    with running(folder, dtype=dtype) as engine:
        alone = [tokens(engine.generate([request]))[0] for request in requests(PLAIN, temperature=temperature)]
        for endpoint in (DRAFTED, TOGETHER):
            answers = engine.generate(requests(endpoint, temperature=temperature))
            assert tokens(answers) == alone
            assert total(answers, "drafted") > 60
    with running(folder, dtype=dtype, kv_tokens=160) as engine:
        assert tokens(engine.generate(requests(DRAFTED, temperature=temperature))) == alone


@pytest.mark.slow
def test_texts_are_the_same_after_a_target_is_lost(folder: Path) -> None:
    with running(folder, dtype="bfloat16") as engine:
        expected = tokens(engine.generate(requests(PLAIN)))
    with running(folder, targets=2, dtype="bfloat16") as engine:
        answers: list[list[Delta]] = [[] for _ in expected]
        for request, answer in zip(requests(DRAFTED), answers, strict=True):
            engine.coordinator.submit(request, answer.append)
        wait_until(lambda: sum(map(len, answers)) > len(answers), "first tokens")
        engine.lose("target")
        wait_until(lambda: all(answer and answer[-1].finish for answer in answers), "all answers")
    assert tokens(answers) == expected


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
@pytest.mark.parametrize("name", PARAMS)
def test_a_layer_that_knows_what_follows_drafts_most_of_it(name: str, temperature: float, tmp_path: Path) -> None:
    """It sees the token before each through its projection, whose halves must not be in the other order."""
    make_mtp(name, tmp_path, right=True)
    with running(tmp_path, dtype="float32") as engine:
        expected = tokens(engine.generate(requests(PLAIN, temperature=temperature)))
        answers = engine.generate(requests(DRAFTED, temperature=temperature))
    assert tokens(answers) == expected
    assert total(answers, "accepted") > 0.7 * sum(map(len, expected))
    if name.startswith("qwen3"):  # chains only, since its layers carry a state
        assert total(answers, "accepted") == total(answers, "drafted")


@pytest.mark.parametrize("right", [True, False])
def test_a_test_at_the_start_tells_whether_it_knows_what_follows(right: bool, tmp_path: Path) -> None:
    make_mtp("qwen3_5", tmp_path, right=right)
    spec = ModelSpec(name="m", path=str(tmp_path), device="cpu", dtype="float32", slots=4, max_length=64, threads=1)
    heads = HeadsSpec(name="h", path=str(tmp_path), kind="mtp", min_acceptance=0.9)
    if right:
        load_with_heads(spec, heads)
        return
    with pytest.raises(
        ConfigError, match=r"h: \d+% of the first draft tokens of .* lower `min_acceptance` to use them"
    ):
        load_with_heads(spec, heads)
