"""The text of a target is its own while its drafter's weights are replaced in mid-stream."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.adaptation import Adaptation, AdaptationOptions, CommittedText, FromLearner, Texts, ToLearner
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.sampling.params import SamplingParams
from engine.layers.faster_layers import use_faster_layers
from engine.loading.new_weights import copy_weights
from engine.model.runner import Runner
from tests.in_process.test_parameters import PROMPTS, SlowRunner, text, tokens
from tests.support import reference
from tests.support.models import tiny_model
from tests.support.trimmed import copied
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)  # requests to a dead loop never end
SIZE: dict[str, Any] = {"slots": 12, "max_length": 128, "max_query": 64}
OPTIONS = AdaptationOptions(module="none", update_after=1)
TARGET = tiny_model("llama-gqa")
ENDPOINT = Endpoint("e", "target", "drafter", 4, text)
GREEDY = [SamplingParams(max_tokens=32, temperature=0)] * 12
SEEDED = [
    SamplingParams(max_tokens=32, temperature=temperature, top_k=top_k, seed=seed)
    for seed, (temperature, top_k) in enumerate([(0.3, 0), (0.7, 20), (1.0, 0), (0.5, 5)] * 3)
]


class KeepsTexts:
    """A learner that learns nothing."""

    def __init__(self) -> None:
        self.texts: list[CommittedText] = []

    def send(self, message: ToLearner) -> None:
        if isinstance(message, Texts):
            self.texts += message.texts

    def receive(self) -> list[FromLearner]:
        return []

    def close(self) -> None:
        pass


class SwapsEveryTurn(Adaptation):
    """Replaces the weights by others, and back, between any two steps."""

    def __init__(self, runner: Runner, *others: PreTrainedModel) -> None:
        super().__init__(OPTIONS, KeepsTexts, lambda folder: None)
        self.swaps = 0
        self._runner, self._others = runner, others

    def turn(self, *, idle: bool) -> None:
        if not idle:
            copy_weights(self._runner.model, self._others[self.swaps % len(self._others)])
            self.swaps += 1


def drafter(noise: float) -> PreTrainedModel:
    """Return the target with noise in its weights, as it would be served."""
    model = copied(TARGET)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    use_faster_layers(model)
    return model


def requests(params: list[SamplingParams]) -> list[Request]:
    return [Request(ENDPOINT, PROMPTS[i], each, request_id=i) for i, each in enumerate(params)]


def run(adaptation: Adaptation, runner: Runner, asked: list[Request]) -> list[list[Delta]]:
    options = {"drafter": LoopOptions(adaptation=adaptation)}
    replicas: Any = {"target": ("target", SlowRunner(TARGET, **SIZE)), "drafter": ("drafter", runner)}
    with Engine(replicas, LoopOptions(adaptive=False), own_options=options) as engine:
        answers = engine.generate(asked)
        wait_until(lambda: not engine.loops["drafter"].load().active, "the drafter has no rows")
    return answers


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_is_that_of_generate(params: list[SamplingParams]) -> None:
    runner = Runner(drafter(0.0), **SIZE)
    adaptation = SwapsEveryTurn(runner, drafter(0.02), drafter(0.0), drafter(0.005))
    expected = reference.generate(copied(TARGET), PROMPTS[: len(params)], params)
    answers = run(adaptation, runner, requests(params))
    assert tokens(answers) == expected
    statistics = [answer[-1].statistics for answer in answers]
    assert 12 < sum(each.accepted for each in statistics) < sum(each.drafted for each in statistics)
    assert adaptation.swaps > 8


def test_a_learner_gets_what_was_committed_but_nothing_with_a_salt() -> None:
    learner = KeepsTexts()
    *asked, last = requests(GREEDY[:4])
    secret = Request(ENDPOINT, last.prompt, last.params, request_id=last.request_id, cache_salt="secret")
    adaptation = Adaptation(OPTIONS, lambda: learner, lambda folder: None)
    answers = run(adaptation, Runner(drafter(0.0), **SIZE), [*asked, secret])
    adaptation.turn(idle=True)
    assert len(learner.texts) == 3
    for request, written in zip(asked, tokens(answers), strict=False):
        (learned,) = [each for each in learner.texts if each.tokens[: each.prompt_length] == request.prompt]
        answer = learned.tokens[learned.prompt_length :]
        assert answer == written[: len(answer)]
        assert len(answer) > len(written) - 12  # the request may end before the drafter hears of the last tokens
        assert learned.params == request.params
