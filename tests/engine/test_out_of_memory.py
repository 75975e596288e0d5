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
from actors.loops.oom_backoff import OomBackoff
from actors.loops.options import LoopOptions
from actors.loops.row_table import Row, RowTable
from actors.loops.thread import LoopTimes
from actors.model.forward_input import RowInput
from actors.model.page_tables import PageTables
from actors.model.runner import Runner
from actors.replica.in_process import Engine
from actors.target.judge import judge
from decoding.beams.group import BeamGroup
from decoding.beams.options import BeamOptions
from decoding.blending.ensemble_options import EnsembleOptions
from decoding.blending.params import BlendParams
from decoding.errors import UnavailableError
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import process
from tests.actors.loops.test_row_table import make_row
from tests.engine.test_parameters import noisy
from tests.support.models import VOCAB, tiny_model

MODELS = {"target": tiny_model("llama-gqa"), "member": tiny_model("qwen3"), "drafter": noisy(tiny_model("llama-gqa"))}
SLOTS = 6


class ScarceRunner(Runner):
    """A runner with memory for `most_tokens` per call, and sometimes for a single token only."""

    most_tokens = 10**9
    failing = 0.0
    rng = random.Random(0)

    def logits(self, rows: Sequence[RowInput], *, last_only: bool = False) -> Tensor:
        tokens = sum(len(row.tokens) for row in rows)
        logits = super().logits(rows, last_only=last_only)
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
    assert {name: loop.load().active for name, loop in engine.loops.items()} == dict.fromkeys(MODELS, 0)
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
            [token for delta in answer for token in delta.tokens],
            [other.tokens for other in answer[-1].others],
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
        mock.patch.object(OomBackoff, "_give_up_on", lambda self, row: self._remove_limits()),
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
            if rng.random() < 0.2:
                raise torch.OutOfMemoryError("sampling")
            return function(*arguments)

        return call

    with (
        mock.patch("actors.target.loop.judge", sometimes(judge)),
        mock.patch("actors.target.beams.process", sometimes(process)),
        mock.patch.object(BeamGroup, "_candidates", sometimes(BeamGroup._candidates)),
        mock.patch.object(OomBackoff, "_give_up_on", lambda self, row: self._remove_limits()),  # try again
        running() as engine,
    ):
        assert texts(engine.generate(ASKED)) == expected


def computing(fits: bool) -> None:
    if not fits:
        raise torch.OutOfMemoryError


class Stage:
    """Rows without a model, and a backoff that chooses what is computed at once."""

    def __init__(self) -> None:
        self.rows: RowTable[Row] = RowTable(PageTables(slots=4, capacity=64))
        self.times = LoopTimes()
        self.failed: list[tuple[Row, str]] = []
        self.backoff = OomBackoff[Row](
            4, self.times, lambda row, error: self.failed.append((row, str(error))), prefill_chunk=32
        )

    def step(self, most: int) -> list[int]:
        """Return the rows that were computed. most: how many fit into memory."""
        rows = self.backoff.choose(list(self.rows))
        fits = len(rows) <= most
        self.backoff.step(lambda: computing(fits), rows)
        return [row.key[1] for row in rows] if fits else []


def test_rows_take_turns_until_there_is_memory_again() -> None:
    stage = Stage()
    for index in range(4):
        stage.rows.add(make_row(index))
    assert stage.step(2) == []
    assert not stage.backoff.speculates  # speculation is the first thing given up
    assert [stage.step(2) for _ in range(4)] == [[], [0, 1], [2, 3], [0, 1]]
    stage.rows.remove(make_row(1).key)
    assert [stage.step(2) for _ in range(3)] == [[2, 3], [0, 2], [0, 3]]
    for _ in range(256):
        stage.step(4)
    assert (stage.step(4), stage.backoff.speculates) == ([0, 2, 3], True)
    assert (stage.failed, stage.times.out_of_memory) == ([], 2)


def test_chunks_of_prompts_shrink_and_grow_again() -> None:
    stage = Stage()
    stage.rows.add(make_row(1, 40))
    rows = list(stage.rows)

    def chunk_after(calls: int, *, most: int) -> int:
        """most: how many tokens fit into memory."""
        for _ in range(calls):
            stage.backoff.prefill(lambda: computing(stage.backoff.prefill_chunk <= most), rows)
        return stage.backoff.prefill_chunk

    assert [chunk_after(10, most=most) for most in (8, 1)] == [8, 1]
    assert [chunk_after(calls, most=32) for calls in (256, 256, 1000, 1000)] == [2, 4, 32, 32]
    chunk_after(6, most=0)
    assert stage.failed == [(rows[0], "the device has too little memory for it, even alone: 40 tokens in a KV slot")]
    assert stage.backoff.prefill_chunk == 32
