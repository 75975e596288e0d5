"""Ask the members of a panel for whole answers, and for the likelihood of the others' answers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

from actors.coordinator.request import Delta, Request
from decoding.errors import ConsortError, DeadlineError, UnavailableError
from decoding.sampling.noise_keys import choice_seed
from decoding.sampling.params import SamplingParams

T = TypeVar("T")
Run = Callable[[Sequence[Request]], AsyncGenerator[list[tuple[int, Delta]], None]]

_WATCH_S = 1.0  # between checks that a silent member still has a replica


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield each item as it comes, with the index of its stream. The first error cancels all; so does closing."""
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()  # None: a stream has ended

    async def forward(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One of a member's answers. It equals only itself."""

    member: str
    index: int  # among the member's candidates
    delta: Delta  # the complete answer, with log-probabilities

    @property
    def log_likelihood(self) -> float:
        """Nats per token by the member itself, the end token included; −∞ without tokens."""
        tokens = self.delta.logprobs
        return fmean(token.logprob for token in tokens) if tokens else float("-inf")


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Join all deltas of an answer into one."""
    first, last = deltas[0], deltas[-1]
    return Delta(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
        last.statistics,
        prompt_logprobs=first.prompt_logprobs,
        finish=last.finish,
        stop_reason=last.stop_reason,
    )


@dataclass(slots=True, eq=False)
class Participant:
    """A member's state in a panel."""

    request: Request  # as the member gets it, for the model that it is
    candidates: list[Candidate] = field(default_factory=list)
    latency_s: float = 0.0
    error: ConsortError | None = None

    @property
    def model(self) -> str:
        return self.request.endpoint.target


def for_members(request: Request, models: Sequence[str]) -> list[Request]:
    """Return the request as each of the models gets it, all of which have the same tokens."""
    endpoints = [replace(request.endpoint, target=model, members=()) for model in models]
    return [replace(request, endpoint=endpoint) for endpoint in endpoints]


class MemberClient:
    """Runs requests on members. Raises if a member is gone or too late, or if nobody can serve a request."""

    def __init__(self, run: Run, ready: Callable[[], set[str]], timeout_s: float) -> None:
        """
        run: as `Service.run`. ready: returns the models that can be asked.
        timeout_s: time limit of a member for all requests of a call.
        """
        self._run, self._ready, self._timeout_s = run, ready, timeout_s

    async def propose(self, member: Participant, count: int, first: int) -> AsyncGenerator[Candidate, None]:
        """Yield the member's candidates as they complete. first: index of its first seed among all members'."""
        began_s, request = time.monotonic(), member.request
        seeds = [choice_seed(request.params.seed, first + i) for i in range(count)]
        params = [replace(request.params, logprobs=request.params.logprobs or 0, seed=seed) for seed in seeds]
        requests = [_request_for(request, request.prompt, each) for each in params]
        async with aclosing(self._answers(member.model, requests)) as answers:
            async for index, delta in answers:
                candidate = Candidate(member.model, index, delta)
                member.candidates.append(candidate)
                member.latency_s = time.monotonic() - began_s
                yield candidate

    async def judge(self, request: Request, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the log-likelihood of each text after the prompt, in nats per token. Texts must not be empty."""
        requests = [_scoring_request(request, text) for text in texts]
        likelihoods = [0.0] * len(texts)
        async with aclosing(self._answers(request.endpoint.target, requests)) as answers:
            async for index, delta in answers:
                tokens = [*(delta.prompt_logprobs or ()), *delta.logprobs][-len(texts[index]) :]
                likelihoods[index] = fmean(token.logprob for token in tokens)
        return likelihoods

    async def _answers(self, model: str, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield complete answers as they end, with the index of their request."""
        parts: list[list[Delta]] = [[] for _ in requests]
        deadline_s = time.monotonic() + self._timeout_s
        async with aclosing(self._run(requests)) as batches:
            while (batch := await self._next(batches, model, deadline_s)) is not None:
                for index, delta in batch:
                    parts[index].append(delta)
                    if delta.finish is not None:
                        yield index, join_deltas(parts[index])

    async def _next(
        self, batches: AsyncGenerator[list[tuple[int, Delta]], None], model: str, deadline_s: float
    ) -> list[tuple[int, Delta]] | None:
        """Return the next batch, None after the last; raises if the member is gone or takes too long."""
        waiting = asyncio.ensure_future(anext(batches, None))
        try:
            while True:
                left_s = deadline_s - time.monotonic()
                done, _ = await asyncio.wait({waiting}, timeout=max(min(left_s, _WATCH_S), 0))
                if done:
                    return waiting.result()
                if left_s <= 0:
                    raise DeadlineError(f"member {model!r} took longer than {self._timeout_s:g} s")
                if model not in self._ready():
                    raise UnavailableError(f"member {model!r} is gone")
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})


def _request_for(request: Request, prompt: Sequence[int], params: SamplingParams) -> Request:
    return Request(
        request.endpoint,
        prompt,
        params,
        speculate=request.speculate,
        draft_length=request.draft_length,
        timeout_s=request.timeout_s,
        cache_salt=request.cache_salt,
    )


def _scoring_request(request: Request, text: Sequence[int]) -> Request:
    """Return a one-step request that scores the text. Its last token is forced, so that the context suffices."""
    params = SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=(text[-1],), logprobs=0, prompt_logprobs=0)
    return replace(_request_for(request, [*request.prompt, *text[:-1]], params), speculate=False)
