"""`AsyncLLM` writes what `LLM` writes, many requests at a time, and ends requests whose task is cancelled."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

import pytest

from consort import LLM, AsyncLLM, Client, InvalidRequestError, Piece, SamplingParams, UnavailableError
from deployments.configuration.paths import ROOT
from tests.support.waiting import wait_until

TARGET, DRAFTER = ROOT / "models" / "target", ROOT / "models" / "drafter"
PROMPTS = ["def add(a, b):", "class Stack:\n", "import os\n\n"]
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=3)
ENDLESS = SamplingParams(max_tokens=200, ignore_eos=True)
QUESTION = [{"role": "user", "content": "Write a function that adds two numbers."}]

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TARGET, drafter=DRAFTER, dtype="float32", threads=1, max_length=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def model() -> Iterator[AsyncLLM]:
    model = AsyncLLM(TARGET, drafter=DRAFTER, dtype="float32", threads=1, max_length=256)
    yield model
    model.close()


def run(work: Callable[[], Awaitable[Result]]) -> Result:
    async def within() -> Result:
        return await work()

    return asyncio.run(within())


def running(model: AsyncLLM) -> int:
    reports = model._endpoint._engine.coordinator.reports()
    return sum(report.active + report.waiting for _, report in reports if report is not None)


async def collected(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


def test_texts_are_those_of_llm(llm: LLM, model: AsyncLLM) -> None:
    async def work() -> None:
        answers = await model.generate(PROMPTS, SAMPLED)
        assert [answer.text for answer in answers] == [answer.text for answer in llm.generate(PROMPTS, SAMPLED)]
        assert await model.generate([]) == []
        pieces = await collected(model.stream(PROMPTS[0], SAMPLED))
        assert "".join(piece.text for piece in pieces) == answers[0].text
        assert pieces[-1].finish_reason == answers[0].choices[0].finish_reason
        answer, expected = await model.chat(QUESTION, SAMPLED), llm.chat(QUESTION, SAMPLED)
        assert (answer.text, answer.completion_tokens) == (expected.text, expected.completion_tokens)
        pieces = await collected(model.stream_chat(QUESTION, SAMPLED))
        assert "".join(piece.text for piece in pieces) == answer.text

    run(work)


def test_many_requests_share_steps(llm: LLM, model: AsyncLLM) -> None:
    seeds = [replace(SAMPLED, seed=seed) for seed in range(12)]

    async def work() -> list[str]:
        streams = [collected(model.stream(PROMPTS[seed % 3], params)) for seed, params in enumerate(seeds)]
        return ["".join(piece.text for piece in pieces) for pieces in await asyncio.gather(*streams)]

    alone = [llm.generate(PROMPTS[seed % 3], params)[0].text for seed, params in enumerate(seeds)]
    assert run(work) == alone


def test_several_answers_stream_at_once(llm: LLM, model: AsyncLLM) -> None:
    params = replace(SAMPLED, n=3)
    pieces = run(lambda: collected(model.stream(PROMPTS[0], params)))
    texts = ["".join(piece.text for piece in pieces if piece.index == index) for index in range(3)]
    assert texts == [choice.text for choice in llm.generate(PROMPTS[0], params)[0].choices]


def test_a_cancelled_task_ends_its_requests_and_no_others(llm: LLM, model: AsyncLLM) -> None:
    async def work() -> None:
        first = asyncio.Event()

        async def endless() -> None:
            async for _ in model.stream(PROMPTS[0], ENDLESS):
                first.set()

        leaving = [asyncio.create_task(endless()), asyncio.create_task(model.generate(PROMPTS, ENDLESS))]
        staying = asyncio.create_task(model.generate(PROMPTS, SAMPLED))
        await first.wait()
        for task in leaving:
            task.cancel()
        results = await asyncio.gather(*leaving, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        assert [each.text for each in await staying] == [each.text for each in llm.generate(PROMPTS, SAMPLED)]

    run(work)
    wait_until(lambda: running(model) == 0, "requests to end")


def test_a_closed_iterator_and_a_closed_loop_end_requests(model: AsyncLLM) -> None:
    async def one_piece() -> None:
        async with aclosing(model.stream(PROMPTS[0], ENDLESS)) as pieces:
            await anext(pieces)

    async def abandoned() -> None:
        pieces = model.stream(PROMPTS[0], ENDLESS)
        await anext(pieces)

    for work in (one_piece, abandoned):
        run(work)
        wait_until(lambda: running(model) == 0, "requests to end")
    assert run(lambda: model.generate(PROMPTS[0], SAMPLED))[0].text  # the coordinator lives on


def test_mistakes_are_named(model: AsyncLLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^temperature must be"):
        run(lambda: model.generate(PROMPTS, replace(SAMPLED, temperature=-1)))


def test_closing_ends_requests_in_progress() -> None:
    async def work() -> None:
        async with AsyncLLM(TARGET, dtype="float32", threads=1, max_length=256) as model:
            pieces = model.stream(PROMPTS[0], ENDLESS)
            await anext(pieces)
        with pytest.raises(UnavailableError):
            async for _ in pieces:
                pass
        with pytest.raises(UnavailableError, match="this model was closed"):
            await model.generate(PROMPTS)

    run(work)


def test_closing_ends_what_other_threads_wait_for() -> None:
    with LLM(TARGET, dtype="float32", threads=1, max_length=256) as llm, ThreadPoolExecutor(1) as waiting:
        pieces = llm.stream(PROMPTS[0], ENDLESS)
        next(pieces)
        answers = waiting.submit(llm.generate, PROMPTS, ENDLESS)
        llm.close()
        for work in (answers.result, lambda: list(pieces)):
            with pytest.raises(UnavailableError, match="this model was closed"):
                work()


def test_embeddings_are_refused_with_what_to_use(llm: LLM, model: AsyncLLM) -> None:
    for each in (llm, model, Client()):
        with pytest.raises(InvalidRequestError, match=r"^embed: .* sentence-transformers"):
            each.embed(["a"], normalize=True)
