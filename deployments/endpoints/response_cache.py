"""Answers that were given before, for requests whose answer is determined: greedy ones, and those with a client's seed.

Exact: a request is looked up by all that its answer depends on. Holds whole answers, up to a number of tokens in all.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from actors.coordinator.request import Delta, Request


class ResponseCache:
    """The answers used last, at most `max_tokens` tokens of prompts and answers together; 0: none."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._answers: OrderedDict[Hashable, tuple[int, Sequence[Delta]]] = OrderedDict()  # tokens; oldest use first

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def keeps(self) -> bool:
        """Whether any answer is kept."""
        return self._max_tokens > 0

    def may_hold(self, request: Request) -> bool:
        """Whether the request's answer is determined."""
        params = request.params
        timed = params.max_time_s is not None or request.endpoint.criteria
        return self._max_tokens > 0 and not timed and (params.greedy or (request.seeded and not params.rejects))

    def get(self, request: Request) -> Sequence[Delta] | None:
        """The deltas of an earlier answer to the same request."""
        if not self.may_hold(request):
            return None
        key = _key(request)
        found = self._answers.get(key)
        if found is None:
            return None
        self._answers.move_to_end(key)
        return found[1]

    def put(self, request: Request, deltas: Sequence[Delta]) -> None:
        """Keep a whole answer. Failed ones, and those of ensembles that lost a member, are not kept."""
        last = deltas[-1]
        if last.finish is None or any(member.weight == 0 for member in last.members or ()):
            return
        key = _key(request)
        size = len(request.prompt) + sum(len(delta.tokens) for delta in deltas)
        self._forget(key)
        self._answers[key] = size, tuple(deltas)
        self._tokens += size
        while self._tokens > self._max_tokens:
            self._forget(next(iter(self._answers)))

    def _forget(self, key: Hashable) -> None:
        size, _ = self._answers.pop(key, (0, ()))
        self._tokens -= size


def _key(request: Request) -> tuple[Hashable, ...]:
    """What the answer depends on; and how much is drafted, which its statistics tell."""
    return (
        request.endpoint.name,
        tuple(request.prompt),
        request.endpoint.target,  # candidates are asked of several models
        request.params.with_seed(0) if request.params.greedy else request.params,
        request.max_draft_length,
        request.ensemble_options if request.endpoint.members else None,
        request.beams,
    )
