"""When a device runs out of memory, loops compute less at once and write the same texts."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.loops.scheduler import Scheduler
from actors.replica.in_process import Engine
from actors.verifier.judge import judge
from decoding.beams.options import BeamOptions
from decoding.beams.search import BeamGroup
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.errors import UnavailableError
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import process
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.in_process.test_parameters import noisy
from tests.support.models import VOCAB, tiny_model
from tests.support.waiting import wait_until_idle

MODELS = {"target": tiny_model("llama-gqa"), "member": tiny_model("qwen3"), "drafter": noisy(tiny_model("llama-gqa"))}
SLOTS = 6


class ScarceRunner(Runner):
    """A runner with memory for `most_tokens` per call, and sometimes for a single token only."""

    most_tokens = 10**9
    failing = 0.0
    rng = random.Random(0)

    def logits(self, rows: Sequence[RowInput]) -> Tensor:
        tokens = sum(len(row.tokens) for row in rows)
        logits = super().logits(rows)
        if tokens > self.most_tokens or (tokens > 1 and self.rng.random() < self.failing):
            raise torch.OutOfMemoryError(f"{tokens} tokens")
        return logits


@contextmanager
def running(**scarce: Any) -> Iterator[Engine]:
    """scarce: attributes for all `ScarceRunner`s."""
    runners = {name: ScarceRunner(model, slots=SLOTS, max_length=160, max_query=64) for name, model in MODELS.items()}
    engine = Engine(
        {name: ("drafter" if name == "drafter" else "target", runner) for name, runner in runners.items()},
        LoopOptions(prefill_chunk=32, adaptive=False),
    )
    for runner in runners.values():  # not while steps are timed
        for name, value in scarce.items():
            setattr(runner, name, value)
    with engine:
        yield engine
        engine.check()
        wait_until_idle(engine)
    assert {name: runner.cache.free for name, runner in runners.items()} == dict.fromkeys(MODELS, SLOTS)


PLAIN = Endpoint("plain", "target", None, 0, decode=str)
DRAFTED = Endpoint("drafted", "target", "drafter", 4, decode=str)
BLENDED = Endpoint(
    "blended", "target", "drafter", 4, decode=str, members=["member"], ensemble=EnsembleOptions(blend=BlendParams())
)


def requests() -> list[Request]:
    """Return requests of all kinds; some prompts share a prefix."""
    rng = random.Random(1)
    stem = [rng.randrange(VOCAB) for _ in range(40)]
    asked = []
    for index in range(18):
        prompt = [*stem[: rng.choice([0, 25, 40])], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 50)))]
        more: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 1} if index % 9 == 4 else {}
        params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=index % 2, seed=index, **more)
        asked.append(Request((PLAIN, DRAFTED, BLENDED)[index % 3], prompt, params))
    searching = SamplingParams(max_tokens=8, temperature=0)
    for beams, groups in ((2, 1), (4, 2)):
        options = BeamOptions(
            num_beams=beams, num_return_sequences=2, num_beam_groups=groups, diversity_penalty=groups - 1
        )
        asked.append(Request(PLAIN, stem[:30], searching, beams=options))
    return asked


def texts(answers: list[list[Delta]]) -> list[object]:
    return [
        [
            [token for delta in answer for token in delta.token_ids],
            [other.token_ids for other in answer[-1].others],
            [token.token for token in answer[0].prompt_logprobs or ()],
            answer[-1].finish,
        ]
        for answer in answers
    ]


ASKED = requests()


@pytest.fixture(scope="module")
def expected() -> list[object]:
    with running() as engine:
        return texts(engine.generate(ASKED))


@pytest.mark.parametrize(
    "scarce", [{"most_tokens": 20}, {"most_tokens": 4}, {"failing": 0.05}, {"failing": 0.4}], ids=str
)
def test_texts_are_those_of_a_device_with_enough_memory(scarce: dict[str, Any], expected: list[object]) -> None:
    with (
        mock.patch.object(Scheduler, "_give_up_on"),
        running(**scarce) as engine,
    ):
        assert texts(engine.generate(ASKED)) == expected
        assert engine.loops["target"].times.out_of_memory > 0


def test_a_request_that_cannot_run_even_alone_fails_and_the_others_go_on(expected: list[object]) -> None:
    """With memory for three tokens, four beams are impossible, and prompts need small chunks."""
    message = "the device has too little memory for it, even alone: 30 tokens in 4 KV slots"
    *others, _, search = [index for index, request in enumerate(ASKED) if request.endpoint is PLAIN]
    with running(most_tokens=3) as engine, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(engine.generate, [ASKED[index] for index in others[:4]])
        with pytest.raises(UnavailableError, match=message):
            list(engine.stream(ASKED[search]))
        assert texts(answers.result()) == [expected[index] for index in others[:4]]


def test_memory_that_is_lacking_after_the_forward(expected: list[object]) -> None:
    """Sampling and the choice of beams run out of memory anywhere."""
    rng = random.Random(2)

    def sometimes(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if rng.random() < 0.1:
                raise torch.OutOfMemoryError("sampling")
            return function(*arguments)

        return call

    with (
        mock.patch("actors.verifier.loop.judge", sometimes(judge)),
        mock.patch("actors.verifier.beams.process", sometimes(process)),
        mock.patch.object(BeamGroup, "_candidates", sometimes(BeamGroup._candidates)),
        mock.patch.object(Scheduler, "_give_up_on"),  # try again
        running() as engine,
    ):
        assert texts(engine.generate(ASKED)) == expected
