"""A coordinator without replicas. Answers are drawn from the request's seed, several tokens per step."""

import random
from collections import Counter
from collections.abc import Callable

from actors.coordinator.active_request import TextStream
from actors.coordinator.request import Delta, Request, Statistics
from actors.wire.messages import ReplicaAddress, Report, Token, TokenSource
from decoding.drafts.draft import ProposerName
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.stopping import FinishReason

VOCAB = 2048
_FIRST_TOKEN = 6  # those below are special


class FakeCoordinator:
    """Answers at once, with made-up log-probabilities that depend on the token alone."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.ready = {"target", "drafter"}
        self.slots = 4  # of the target
        self.malformed = 3

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        self.requests.append(request)
        for delta in answer(request):
            sink(delta)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def weights(self, model: str) -> None:
        return None

    def replica_starts(self) -> Counter[str]:
        return Counter(target=2)

    def models(self) -> set[str]:
        return self.ready

    def sleeping(self) -> set[str]:
        return set()

    def reports(self) -> list[tuple[ReplicaAddress, Report | None]]:
        """Report one half-used replica of the target, and one of the drafter without a report yet."""
        report = Report(active=2, waiting=1, slots=self.slots, request_ids=[], pages=8, used_pages=4)
        target, drafter = (ReplicaAddress(f"{name}-0", name, "tcp://127.0.0.1:1") for name in ("target", "drafter"))
        return [(target, report), (drafter, None)]


def fake_logprobs(token: int, count: int) -> TokenLogprobs:
    """Made-up log-probabilities in which small ids are likely."""
    top = tuple((other, -0.5 - other / 100) for other in range(_FIRST_TOKEN, _FIRST_TOKEN + count))
    return TokenLogprobs(token, -0.5 - token / 100, 1 + token - _FIRST_TOKEN, top)


def answer(request: Request) -> list[Delta]:
    """Return all deltas of a request."""
    params, prompt = request.params, request.prompt
    drawn = random.Random(params.seed)
    text = TextStream(request.endpoint.decode, prompt, params, request.endpoint.criteria)
    deltas: list[Delta] = []
    statistics, made = Statistics(), 0
    while not deltas or deltas[-1].finish is None:
        size = min(drawn.randint(1, 4), params.max_tokens - made)
        tokens = [drawn.randrange(_FIRST_TOKEN, VOCAB) for _ in range(size)]
        made += size
        finish: FinishReason | None = "length" if made == params.max_tokens else None
        piece = text.add(tokens, finish)
        tokens = tokens[: piece.used]
        statistics += Statistics(steps=1, drafted=4, accepted=len(tokens) - 1, committed=len(tokens), missed=1, hits=1)
        logprobs = [None if params.logprobs is None else fake_logprobs(token, params.logprobs) for token in tokens]
        sources: list[TokenSource] = ["accepted"] * (len(tokens) - 1)
        proposers: list[ProposerName | None] = ["drafter" if token % 2 else "ngram" for token in tokens[:-1]]
        deltas.append(
            Delta(
                piece.text,
                [*map(Token, tokens, [*sources, "recovered"], [*proposers, None], logprobs)],
                statistics,
                prompt_logprobs=None
                if params.prompt_logprobs is None or deltas
                else [fake_logprobs(token, params.prompt_logprobs) for token in prompt[1:]],
                finish=piece.finish,
                stop_reason=piece.stop_reason,
            )
        )
    if params.prompt_attention:
        request.prompt_attention[:] = [token / VOCAB for token in prompt]
    return deltas
