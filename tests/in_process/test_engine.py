"""Callers that wait for an answer get an error when a loop of the engine has ended, and only then."""

import time
from typing import Any

import pytest

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.errors import InvalidRequestError, UnavailableError
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support.models import tiny_model


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_callers_hear_of_a_loop_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("out of memory")

    endpoint = Endpoint("e", "target", None, 0, lambda tokens: "")
    runner = Runner(tiny_model("llama-gqa"), slots=1, max_length=64, max_query=64)
    with Engine({"target": ("target", runner)}) as engine:
        monkeypatch.setattr(runner, "logits", broken)
        with pytest.raises(UnavailableError, match="out of memory"):
            engine.generate([Request(endpoint, [1, 2], SamplingParams(max_tokens=4))])


def test_slow_steps_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.loops.thread._MOST_PATIENCE_S", 0.0)
    monkeypatch.setattr("actors.replica.in_process._CHECK_PERIOD_S", 0.01, raising=True)
    endpoint = Endpoint("e", "target", None, 0, lambda tokens: "")
    runner = Runner(tiny_model("llama-gqa"), slots=1, max_length=64, max_query=64)
    logits = runner.logits

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return logits(*arguments, **options)

    with Engine({"target": ("target", runner)}) as engine:
        monkeypatch.setattr(runner, "logits", slow)
        [answer] = engine.generate([Request(endpoint, [1, 2], SamplingParams(max_tokens=4))])
    assert sum(len(delta.tokens) for delta in answer) == 4


def test_a_request_that_is_refused_as_a_duplicate_does_not_end_the_first() -> None:
    endpoint = Endpoint("e", "target", None, 0, lambda tokens: "")
    runner = Runner(tiny_model("llama-gqa"), slots=1, max_length=64, max_query=64)
    request = Request(endpoint, [1, 2], SamplingParams(max_tokens=40))
    with Engine({"target": ("target", runner)}) as engine:
        first = engine.stream(request)
        count = len(next(first).tokens)
        with pytest.raises(InvalidRequestError, match="in progress already"):
            engine.generate([request])
        assert count + sum(len(delta.tokens) for delta in first) == 40


def test_distributions_may_have_more_tokens_than_a_text() -> None:
    """Under rejection sampling each draft token comes with the tokens that it was drawn from."""
    endpoint = Endpoint("e", "target", "drafter", 4, lambda tokens: "")
    target, drafter = (Runner(tiny_model("llama-gqa"), slots=1, max_length=48, max_query=64) for _ in range(2))
    params = SamplingParams(max_tokens=40, temperature=1, seed=1, verification="rejection")
    with Engine({"target": ("target", target), "drafter": ("drafter", drafter)}, LoopOptions(adaptive=False)) as engine:
        [answer] = engine.generate([Request(endpoint, [1, 2], params)])
    assert answer[-1].statistics.accepted > 0
