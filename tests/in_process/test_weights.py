"""Weights that change under load: each text is that of `generate` with the weights that its answer names."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.wire.messages import Weights, WeightsState
from decoding.errors import UnavailableError
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.new_weights import ReplaceableWeights, digest_of
from engine.loading.runners import load_runner
from tests.in_process.test_parameters import PROMPTS, text
from tests.support import reference
from tests.support.models import tiny_model
from tests.support.trimmed import copied
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)  # requests to a dead loop never end
ENDPOINT = Endpoint("e", "target", "drafter", 4, text)
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0, logprobs=2),
    SamplingParams(max_tokens=24, temperature=0.7, seed=5, logprobs=2),
]
PLAIN = [replace(params, logprobs=None) for params in PARAMS]
KINDS = 4  # of prompts, each with every set of parameters
CHECKPOINTS = 4


def request(kind: int, **changes: Any) -> Request:
    return Request(ENDPOINT, PROMPTS[kind % KINDS], PARAMS[kind // KINDS % len(PARAMS)], **changes)


class Checkpoints(NamedTuple):
    """Folders of a target with some noise in its weights, and its texts of each kind by `generate`."""

    folders: list[Path]
    texts: list[list[list[int]]]  # by checkpoint and kind

    def weights(self, number: int) -> Weights:
        """Return those of a version. Version 0 is checkpoint 0, and so on, again and again."""
        path = str(self.folders[number % CHECKPOINTS])
        return Weights.numbered(number, digest_of(path), path) if number else Weights()

    def text(self, version: str, kind: int) -> list[int]:
        return self.texts[Weights(version).order[0] % CHECKPOINTS][kind]


def noisy(model: PreTrainedModel, number: int) -> PreTrainedModel:
    model, generator = copied(model), torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.data += 0.05 * number * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder, target = tmp_path_factory.mktemp("weights"), tiny_model("llama-gqa")
    models = [noisy(target, number) for number in range(CHECKPOINTS)]
    for number, model in enumerate(models):
        model.save_pretrained(folder / str(number))
    kinds = [(prompt, params) for params in PLAIN for prompt in PROMPTS[:KINDS]]
    prompts, params = [list(each) for each in zip(*kinds, strict=True)]
    texts = [reference.generate(model, prompts, params) for model in models]
    assert len({tuple(text[0]) for text in texts}) == CHECKPOINTS
    return Checkpoints([folder / str(number) for number in range(CHECKPOINTS)], texts)


@contextmanager
def running(checkpoints: Checkpoints, names: list[str], **changes: Any) -> Iterator[Engine]:
    """names: of replicas; those that begin with "drafter" draft. changes: to their spec."""
    size: dict[str, Any] = {"slots": 6, "max_length": 128, "threads": 1, **changes}
    spec = ModelSpec(name="m", path=str(checkpoints.folders[0]), device="cpu", **size)
    replicas, options = {}, {}
    for name in names:
        role: Role = "drafter" if name.startswith("drafter") else "target"
        runner = load_runner(spec)
        replicas[name] = role, runner
        options[name] = LoopOptions(adaptive=False, weights=ReplaceableWeights(runner, spec))
    with Engine(replicas, own_options=options) as engine:
        yield engine


@pytest.fixture
def engine(checkpoints: Checkpoints, names: list[str]) -> Iterator[Engine]:
    with running(checkpoints, names) as engine:
        yield engine


def version(answer: list[Delta]) -> str:
    (named,) = {delta.weights for delta in answer}
    assert named is not None
    return named


def tokens(answer: list[Delta]) -> list[int]:
    return [token for delta in answer for token in delta.token_ids]


@pytest.mark.parametrize(
    ("names", "recompute", "updates"),
    [
        (["target", "drafter"], False, 20),
        (["target", "target#1"], True, 6),
        pytest.param(["target", "target#1", "drafter", "drafter#1"], True, 20, marks=pytest.mark.slow),
        pytest.param(["target", "target#1", "drafter", "drafter#1"], False, 20, marks=pytest.mark.slow),
    ],
)
def test_updates_under_load(engine: Engine, checkpoints: Checkpoints, recompute: bool, updates: int) -> None:
    counter, is_over = itertools.count(), False

    def client(streamed: bool) -> list[tuple[int, int, list[Delta]]]:
        """Ask until the end. Returns kinds, the number of the version when each was asked, and answers."""
        answers = []
        while not is_over:
            kind = next(counter) % (KINDS * len(PARAMS))
            current = engine.coordinator.weights("target")
            assert current is not None
            (answer,) = engine.generate([request(kind, streamed=streamed)])
            answers.append((kind, current.order[0], answer))
        return answers

    with ThreadPoolExecutor(8) as clients:
        running = [clients.submit(client, index % 2 == 0) for index in range(8)]
        try:
            for number in range(1, updates + 1):
                engine.coordinator.set_weights("target", checkpoints.weights(number), recompute=recompute)
                if "drafter" in engine.loops and number % 4 == 0:
                    engine.coordinator.set_weights("drafter", checkpoints.weights(number))
                (answer,) = engine.generate([request(0)])
                assert version(answer).startswith(f"{number}-")
        finally:
            is_over = True
        answers = [each for future in running for each in future.result()]
    assert len(answers) > updates
    for kind, asked, answer in answers:
        assert tokens(answer) == checkpoints.text(version(answer), kind)
        assert Weights(version(answer)).order[0] >= asked
        assert answer[-1].finish == "length"


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "nf4"}])
def test_a_later_scoring_has_the_bits_of_the_rollout(checkpoints: Checkpoints, changes: dict[str, Any]) -> None:
    with running(checkpoints, ["target", "drafter"], **changes) as engine:
        for number in range(1, 3):
            engine.coordinator.set_weights("target", checkpoints.weights(number))
            asked = [request(kind) for kind in range(KINDS * len(PARAMS))]
            rollouts = engine.generate(asked)
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
            for rollout, each in zip(rollouts, asked, strict=True):
                (scoring,) = engine.generate([Request(ENDPOINT, [*each.prompt, *tokens(rollout)], params)])
                assert version(rollout) == version(scoring) == checkpoints.weights(number).version
                scores = scoring[0].prompt_logprobs
                assert scores is not None
                written = [logprobs for delta in rollout for logprobs in delta.logprobs]
                assert written == list(scores)[-len(written) :]


@pytest.mark.parametrize("names", [["target", "drafter"]])
def test_weights_that_cannot_be_loaded_leave_the_old_ones(engine: Engine, checkpoints: Checkpoints) -> None:
    gone = Weights.numbered(1, "0badc0de", str(checkpoints.folders[1]))
    with ThreadPoolExecutor(1) as client:
        engine.coordinator.set_weights("target", gone)
        waiting = client.submit(engine.generate, [request(0)])
        wait_until(lambda: bool(engine.loops["target"].load().weights.unfit), "the target tries to load them")
        assert "has changed since" in engine.loops["target"].load().weights.error
        engine.coordinator.set_weights("target", Weights("2"))
        (answer,) = waiting.result()
    assert version(answer) == "2"
    assert tokens(answer) == checkpoints.texts[0][0]


@pytest.mark.parametrize("names", [["target", "drafter"]])
def test_a_model_sleeps_when_its_requests_have_ended_and_wakes_with_its_weights(
    engine: Engine, checkpoints: Checkpoints
) -> None:
    def is_asleep(*models: str) -> bool:
        return all(engine.loops[model].load().weights.asleep for model in models)

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(engine.generate, [request(kind) for kind in range(KINDS)])
        wait_until(lambda: bool(engine.loops["target"].load().active), "the requests have begun")
        for model in ("target", "drafter"):
            engine.coordinator.set_rest(model, 1)
        answers = asked.result()
    assert [tokens(answer) for answer in answers] == checkpoints.texts[0][:KINDS]
    wait_until(lambda: is_asleep("target", "drafter"), "both sleep")
    with pytest.raises(UnavailableError, match="sleeps; POST /v1/wake"):
        engine.generate([request(0)])
    engine.coordinator.set_weights("target", checkpoints.weights(1))  # it gets them when it wakes
    assert is_asleep("target", "drafter")
    for model in ("target", "drafter"):
        engine.coordinator.set_rest(model, 2)
    for kind in range(KINDS):
        (answer,) = engine.generate([request(kind)])
        assert tokens(answer) == checkpoints.texts[1][kind]
    wait_until(lambda: not is_asleep("drafter"), "the drafter wakes")


@pytest.mark.parametrize("names", [["target"]])
def test_a_model_that_could_not_wake_wakes_later(
    engine: Engine, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As after a trainer that held the memory, or a disk that was away."""
    held, away = checkpoints.folders[0] / "model.safetensors", tmp_path_factory.mktemp("away") / "held"
    asked = replace(request(0), endpoint=replace(ENDPOINT, drafter=None))

    def state() -> WeightsState:
        return engine.loops["target"].load().weights

    engine.coordinator.set_rest("target", 1)
    wait_until(lambda: state().asleep, "it sleeps")
    held.rename(away)
    try:
        engine.coordinator.set_rest("target", 2)
        wait_until(lambda: "no file named" in state().error, "it can't wake")
        engine.coordinator.set_rest("target", 3)
        wait_until(lambda: not state().error, "it sleeps on")
    finally:
        away.rename(held)
    assert state().asleep
    engine.coordinator.set_rest("target", 4)
    (answer,) = engine.generate([asked])
    assert tokens(answer) == checkpoints.texts[0][0]
