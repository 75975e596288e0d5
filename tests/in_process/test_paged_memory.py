"""Texts are the same however few pages there are; common prefixes are in memory once; no page is lost."""

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from torch import Tensor

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.beams.options import BeamOptions
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.drafts.options import CorpusOptions, NgramOptions
from decoding.errors import InvalidRequestError
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.in_process.test_parameters import noisy
from tests.support.models import VOCAB, tiny_model
from tests.support.waiting import wait_until_idle

MODELS = {"target": tiny_model("llama-gqa"), "member": tiny_model("qwen3"), "drafter": noisy(tiny_model("llama-gqa"))}
ROLES: dict[str, Role] = {"target": "target", "member": "target", "drafter": "drafter"}
PLAIN = Endpoint("plain", "target", None, 0, decode=str)
DRAFTED = Endpoint("drafted", "target", "drafter", 4, decode=str)
NGRAMS = Endpoint("looked up", "target", None, 4, decode=str, ngram=NgramOptions(), corpus=True)
BLENDED = Endpoint(
    "blended", "target", "drafter", 4, decode=str, members=["member"], ensemble=EnsembleOptions(blend=BlendParams())
)


@contextmanager
def running(*, slots: int, pages: int | None = None) -> Iterator[tuple[Engine, dict[str, Runner]]]:
    """Run an engine whose models have so many pages of 16 tokens each. At the end, none may be in use."""
    runners = {
        name: Runner(model, slots=slots, max_length=192, max_query=64, pages=pages) for name, model in MODELS.items()
    }
    replicas = {name: (ROLES[name], runner) for name, runner in runners.items()}
    with Engine(replicas, LoopOptions(prefill_chunk=32, adaptive=False, corpus=CorpusOptions(2048))) as engine:
        yield engine, runners
        engine.check()
        wait_until_idle(engine)
    for runner in runners.values():
        assert (runner.cache.allocator.used, runner.cache.free) == (0, slots)
        assert not runner.cache.tables.any()


def tokens_of(answer: Iterable[Delta]) -> list[int]:
    return [token for delta in answer for token in delta.token_ids]


def texts(answers: list[list[Delta]]) -> list[object]:
    return [(tokens_of(answer), [other.token_ids for other in answer[-1].others]) for answer in answers]


def requests() -> list[Request]:
    """Return requests of all kinds, many of which begin alike."""
    rng = random.Random(3)
    stem = [rng.randrange(VOCAB) for _ in range(70)]
    asked = []
    for index in range(24):
        prompt = [*stem[: rng.choice([0, 30, 70])], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40)))]
        params = SamplingParams(max_tokens=rng.randint(10, 50), temperature=index % 2, seed=index)
        asked.append(Request((PLAIN, DRAFTED, BLENDED)[index % 3], prompt, params))
    search = SamplingParams(max_tokens=20, temperature=0)
    asked.append(Request(PLAIN, stem[:40], search, beams=BeamOptions(num_beams=4)))
    return asked


ASKED = requests()


@pytest.fixture(scope="module")
def alone() -> list[object]:
    with running(slots=8) as (engine, _):
        return [texts(engine.generate([request]))[0] for request in ASKED]


@pytest.mark.parametrize("pages", [16, 40])
def test_memory_that_is_filled_to_the_last_page_loses_nothing(pages: int, alone: list[object]) -> None:
    """The longest request needs 10 pages, and its drafts more; eight run at once."""
    with running(slots=8, pages=pages) as (engine, runners):
        assert texts(engine.generate(ASKED)) == alone
        assert runners["target"].cache.allocator.evictions > 0


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_random_requests_some_of_which_are_cancelled_write_what_plain_decoding_writes(count: int) -> None:
    """Drafts by drafter and n-grams, common beginnings, and clients that leave: on pages for about two requests."""
    rng = random.Random(5)
    asked = [random_request(rng, index) for index in range(count)]
    leaves_after = [rng.choice([1, 2, 3, 8, *[1000] * 12]) for _ in asked]  # deltas
    with running(slots=8) as (engine, _):
        expected = [tokens_of(answer) for answer in engine.generate([replace(each, endpoint=PLAIN) for each in asked])]
    with running(slots=8, pages=11) as (engine, runners), ThreadPoolExecutor(12) as clients:

        def ask(request: Request, deltas: int) -> list[int]:
            return tokens_of(islice(engine.stream(request), deltas))

        written = list(clients.map(ask, asked, leaves_after))
        times = engine.loops["target"].times
        assert runners["target"].cache.allocator.evictions + times.preemptions > 0
    wrong = [
        index
        for index, (text, whole, deltas) in enumerate(zip(written, expected, leaves_after, strict=True))
        if text != (whole if deltas == 1000 else whole[: len(text)])
    ]
    assert not wrong
    assert sum(map(len, written)) > 10 * count


def random_request(rng: random.Random, seed: int) -> Request:
    """Return a request that fits into 11 pages. A third begin alike."""
    stem = [(7 * index) % VOCAB for index in range(rng.choice([0, 0, 20, 60]))]
    prompt = [*stem, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 60)))]
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.7, "repetition_penalty": 1.3, "top_p": 0.9},
        {"temperature": 0, "no_repeat_ngram_size": 2},
        {"temperature": 1, "frequency_penalty": 0.5, "min_tokens": 4, "eos_token_ids": (1, 2, 3)},
    ]
    params = SamplingParams(max_tokens=rng.randint(4, 40), seed=seed, **rng.choice(settings))
    endpoint = rng.choice([PLAIN, DRAFTED, NGRAMS, replace(NGRAMS, drafter="drafter")])
    return Request(endpoint, prompt, params, cache_salt=rng.choice(["", "", "", "own"]))


def test_rows_that_grow_beyond_the_memory_are_preempted_and_write_the_same() -> None:
    """All eight fit at first, but have seven pages each in the end."""
    asked = [
        Request(PLAIN, [index + 1] * 10, SamplingParams(max_tokens=90, temperature=1, seed=index)) for index in range(8)
    ]
    with running(slots=8, pages=24) as (engine, _):
        answers = engine.generate(asked)
        preemptions = engine.loops["target"].times.preemptions
        assert preemptions == sum(answer[-1].statistics.preemptions for answer in answers) > 0
        assert texts(answers) == [texts(engine.generate([request]))[0] for request in asked]


@pytest.mark.parametrize(("pages", "num_beams"), [(20, 2), (24, 4), (20, 6)])
def test_a_request_that_enters_beside_a_beam_search_does_not_stop_it(pages: int, num_beams: int) -> None:
    """Either fits alone, but not both until they end."""
    search = Request(
        PLAIN, [5] * 20, SamplingParams(max_tokens=120, temperature=0), beams=BeamOptions(num_beams=num_beams)
    )
    late = [Request(PLAIN, [6 + index] * 60, SamplingParams(max_tokens=60, temperature=0)) for index in range(2)]
    with running(slots=8) as (engine, _):
        alone = [texts(engine.generate([request]))[0] for request in (search, *late)]
    with running(slots=8, pages=pages) as (engine, _):
        assert texts(engine.generate([search, *late])) == alone


def test_five_hundred_requests_have_their_prefix_in_memory_once() -> None:
    prefix = [(7 * index) % VOCAB for index in range(160)]
    asked = [
        Request(PLAIN, [*prefix, index % VOCAB, index // VOCAB], SamplingParams(max_tokens=2, temperature=0))
        for index in range(500)
    ]
    with running(slots=64, pages=10 + 64 * 2 + 16) as (engine, runners):
        allocator = runners["target"].cache.allocator
        computed = count_computed(runners["target"])
        answers = [text for start in range(0, 500, 125) for text in texts(engine.generate(asked[start : start + 125]))]
        assert sum(computed) < 160 + 500 * 6  # of 81000 tokens
        assert allocator.evictions < 500 * 2  # of the ends of texts; never of the prefix
        assert answers[::50] == [texts(engine.generate([request]))[0] for request in asked[::50]]


def test_a_request_that_can_never_fit_is_refused_with_the_fix() -> None:
    request = Request(PLAIN, [1] * 100, SamplingParams(max_tokens=93, temperature=0))
    with (
        running(slots=2) as (engine, _),
        pytest.raises(InvalidRequestError, match=r"max_tokens is 93 .* lower it to 92") as error,
    ):
        list(engine.stream(request))
    assert error.value.field == "max_tokens"


def count_computed(runner: Runner) -> list[int]:
    """Return a list to which each forward appends its number of tokens."""
    counts: list[int] = []
    logits = runner.logits

    def counting(rows: Sequence[RowInput]) -> Tensor:
        counts.append(sum(len(row.tokens) for row in rows))
        return logits(rows)

    runner.logits = counting  # type: ignore[method-assign]
    return counts
