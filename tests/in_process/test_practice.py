"""A target that traces its model and times its steps beside its first requests."""

import time
from collections.abc import Iterator

import pytest

from actors.coordinator.request import Endpoint, Request
from actors.replica.in_process import Engine
from actors.verifier.practice import Practice
from actors.verifier.step_cost import StepCost
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.families.configurations import make_config, make_model
from tests.support.waiting import wait_until

PROMPTS = [[3 + (7 * seed + index) % 40 for index in range(5 + 9 * seed)] for seed in range(4)]


def made(family: str = "llama", *, later: bool, slots: int = 4) -> Runner:
    runner = Runner(make_model(make_config(family)), slots=slots, max_length=600, max_query=64)
    runner.logits([RowInput(0, 0, [1])])
    runner.cache.clear_all()
    runner.warm_up(later=later)
    return runner


def requests() -> list[Request]:
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=1)
    endpoint = Endpoint("m", "m", None, 3, lambda tokens: "", ngram=NgramOptions())
    return [Request(endpoint, prompt, params) for prompt in PROMPTS]


def texts(engine: Engine) -> list[list[int]]:
    return [[token.id for delta in deltas for token in delta.tokens] for deltas in engine.generate(requests())]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_texts_are_the_same_before_during_and_after(family: str) -> None:
    later = made(family, later=True)
    assert not later._forward.is_traced
    with Engine({"m": ("target", made(family, later=False))}) as engine:
        expected = texts(engine)
    with Engine({"m": ("target", later)}) as engine:
        for _ in iter(lambda: later.practises_later, False):
            assert texts(engine) == expected
        assert texts(engine) == expected
    assert (later._forward.is_traced, later.cache.free) == (True, 4)


def test_an_idle_target_practises_to_the_end() -> None:
    runner = made(later=True)
    with Engine({"m": ("target", runner)}):
        wait_until(lambda: not runner.practises_later, "all parts")
    assert (runner.cache.free, runner.cache.allocator.used) == (4, 0)


def test_few_slots_are_not_held() -> None:
    runner = made(later=True, slots=3)
    assert (runner._forward.is_traced, runner.practises_later) == (True, False)


def test_requests_keep_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def parts(*_: object) -> Iterator[None]:
        nonlocal now_s
        for _part in range(4):
            now_s += 0.25
            yield

    def cost(*_: object) -> Iterator[None]:
        yield from ()

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(Runner, "practice", parts)
    monkeypatch.setattr("actors.verifier.practice.step_cost_in_parts", cost)
    practice, busy = Practice(made(later=True), lambda _: None), []
    while not practice.is_over:
        busy.append(practice.turn(busy=True))
        now_s += 0.25
    assert [seconds > 0 for seconds in busy] == [True, False, False] * 4 + [False]
    assert practice.turn(busy=False) == 0.0


def test_a_cost_takes_over_what_another_knows() -> None:
    cost = StepCost([1, 9], [10.0, 20.0])
    cost.note(1, 30.0)
    measured = StepCost([1, 2, 3], [1.0, 2.0, 2.5])
    cost.replace(measured)
    cost.note(3, 25.0)
    assert (measured(3), cost(1) < 10.0) == (2.5, True)
