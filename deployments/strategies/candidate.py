"""A whole answer that a member proposes. Must not know how it is judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from actors.coordinator.request import Delta


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """The `index`-th answer of a member."""

    member: str
    index: int
    delta: Delta  # all of it, in one; with log-probabilities

    @property
    def text(self) -> str:
        return self.delta.text

    @property
    def tokens(self) -> Sequence[int]:
        return self.delta.tokens

    @property
    def log_likelihood(self) -> float:
        """Nats per token, by the member itself, the end token included; of an answer without tokens, −∞."""
        told = self.delta.logprobs
        return fmean(one.logprob for one in told) if told else float("-inf")


def joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of an answer as one."""
    first, last = deltas[0], deltas[-1]
    return Delta(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
        last.statistics,
        sources=[source for delta in deltas for source in delta.sources],
        logprobs=list(chain.from_iterable(delta.logprobs or () for delta in deltas)),
        prompt_logprobs=first.prompt_logprobs,
        finish=last.finish,
        stop_reason=last.stop_reason,
    )
