"""Exact cache of whole answers to deterministic requests: greedy, or with a client's seed."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from actors.coordinator.request import Delta, Request


class ResponseCache:
    """Least-recently-used cache of at most `max_tokens` tokens, prompts and answers together; 0 disables it.

    What is reported of each token counts as so many tokens more, because it takes as much memory.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0  # of all cached answers and their prompts, and what is reported of them
        self._answers: OrderedDict[Hashable, tuple[int, Sequence[Delta]]] = OrderedDict()  # tokens; oldest use first

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def is_enabled(self) -> bool:
        return self.max_tokens > 0

    def can_hold(self, request: Request) -> bool:
        """Whether the answer is deterministic and the cache enabled."""
        params = request.params
        timed = params.max_time_s is not None or request.endpoint.criteria
        repeats = params.greedy or (request.seeded and not params.rejects)
        return self.is_enabled and request.may_cache and not timed and repeats

    def get(self, request: Request, weights: str | None = None) -> Sequence[Delta] | None:
        """Deltas of an earlier answer to the same request; None: not cached.

        weights: version that the target runs with, as in Delta.
        """
        if not self.can_hold(request):
            return None
        key = _key(request, weights)
        entry = self._answers.get(key)
        if entry is None:
            return None
        self._answers.move_to_end(key)
        return entry[1]

    def put(self, request: Request, deltas: Sequence[Delta]) -> None:
        """Cache a whole answer. Failed answers and those of ensembles that lost a member are not cached."""
        last = deltas[-1]
        if last.finish is None or any(member.weight == 0 for member in last.members or ()):
            return
        key = _key(request, last.weights)
        size = len(request.prompt) + sum(map(_size, deltas))
        self._evict(key)
        if size > self.max_tokens:
            return
        self._answers[key] = size, tuple(deltas)
        self.tokens += size
        while self.tokens > self.max_tokens:
            self._evict(next(iter(self._answers)))

    def _evict(self, key: Hashable) -> None:
        size, _ = self._answers.pop(key, (0, ()))
        self.tokens -= size


def _size(delta: Delta) -> int:
    """Count tokens, log-probabilities and members' shares of tokens, of all answers of a search."""
    logprobs = sum(len(token.top) for token in (*delta.logprobs, *(delta.prompt_logprobs or ())))
    views = sum(len(token.views) for token in delta.tokens)
    return len(delta.tokens) + logprobs + views + sum(map(_size, delta.others))


def _key(request: Request, weights: str | None) -> tuple[Hashable, ...]:
    """Everything that the answer depends on, and the draft length, which its statistics show."""
    return (
        request.endpoint.name,
        request.endpoint.adapter,  # its version, too
        request.endpoint.decode,  # chats may show special tokens that completions hide
        tuple(request.prompt),
        request.endpoint.target,  # candidates of one request come from several models
        request.params.with_seed(0) if request.params.greedy else request.params,
        request.max_draft_length,
        request.ensemble_options if request.members else None,
        tuple(request.members),
        request.beams,
        request.cache_salt,
        weights,
    )
