"""The members of a deliberation, asked in parallel for candidates, and for what they think of those of the others."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from statistics import fmean

from actors.coordinator.request import Delta, Request
from decoding.errors import ConsortError, DeadlineError, UnavailableError
from decoding.sampling.noise import choice_seed
from decoding.sampling.params import SamplingParams
from deployments.strategies.candidate import Candidate, joined

Run = Callable[[Sequence[Request]], AsyncGenerator[list[tuple[int, Delta]], None]]

_WATCH_S = 1.0  # how often a member that is silent is looked for


@dataclass(slots=True, eq=False)
class Member:
    """One model, as the deliberation sees it."""

    model: str
    candidates: list[Candidate] = field(default_factory=list)
    latency_s: float = 0.0
    error: ConsortError | None = None


class Asking:
    """Runs requests on members. A member that is gone or too late raises; so does a request that nobody can serve."""

    def __init__(self, run: Run, ready: Callable[[], set[str]], timeout_s: float) -> None:
        """
        run: deltas of some requests, as `Service.run` has it.
        ready: the models that have a live replica.
        timeout_s: how long a member may take for all that it is asked at once.
        """
        self._run, self._ready, self._timeout_s = run, ready, timeout_s

    async def propose(
        self, member: Member, request: Request, count: int, first: int
    ) -> AsyncGenerator[Candidate, None]:
        """The member's candidates, each when it is complete. first: the first one's number among all members'."""
        began_s = time.monotonic()
        params = replace(request.params, logprobs=request.params.logprobs or 0)
        requests = [
            _on(request, member.model, request.prompt, replace(params, seed=choice_seed(params.seed, first + i)))
            for i in range(count)
        ]
        async with aclosing(self._answers(member.model, requests)) as answers:
            async for index, delta in answers:
                candidate = Candidate(member.model, index, delta)
                member.candidates.append(candidate)
                member.latency_s = time.monotonic() - began_s
                yield candidate

    async def judge(self, model: str, request: Request, texts: Sequence[Sequence[int]]) -> list[float]:
        """How likely the member finds each text after the prompt, in nats per token. No text is empty."""
        requests = [_scoring(request, model, text) for text in texts]
        found = [0.0] * len(texts)
        async with aclosing(self._answers(model, requests)) as answers:
            async for index, delta in answers:
                told = [*(delta.prompt_logprobs or ()), *(delta.logprobs or ())][-len(texts[index]) :]
                found[index] = fmean(one.logprob for one in told)
        return found

    async def _answers(self, model: str, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Delta], None]:
        """Whole answers as they end, with their index."""
        parts: list[list[Delta]] = [[] for _ in requests]
        deadline_s = time.monotonic() + self._timeout_s
        async with aclosing(self._run(requests)) as batches:
            while (batch := await self._next(batches, model, deadline_s)) is not None:
                for index, delta in batch:
                    parts[index].append(delta)
                    if delta.finish is not None:
                        yield index, joined(parts[index])

    async def _next(
        self, batches: AsyncGenerator[list[tuple[int, Delta]], None], model: str, deadline_s: float
    ) -> list[tuple[int, Delta]] | None:
        """The next batch, None after the last.

        Raises:
            UnavailableError: the member has no replica any more.
            DeadlineError: it took too long.
        """
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


def _on(request: Request, model: str, prompt: Sequence[int], params: SamplingParams) -> Request:
    """A request of its own, on a member."""
    endpoint = replace(request.endpoint, target=model, members=())
    return Request(
        endpoint,
        prompt,
        params,
        speculate=request.speculate,
        draft_length=request.draft_length,
        timeout_s=request.timeout_s,
    )


def _scoring(request: Request, model: str, text: Sequence[int]) -> Request:
    """One step that tells of all of the text's tokens. The last is forced, so that the whole still fits the context."""
    params = SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=(text[-1],), logprobs=0, prompt_logprobs=0)
    return replace(_on(request, model, [*request.prompt, *text[:-1]], params), speculate=False)
