"""A complete answer that a member proposes. Must not know how it is judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from actors.coordinator.request import Delta


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One of a member's answers."""

    member: str
    index: int  # among the member's candidates
    delta: Delta  # the complete answer, with log-probabilities

    @property
    def text(self) -> str:
        return self.delta.text

    @property
    def tokens(self) -> Sequence[int]:
        return self.delta.tokens

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
        sources=[source for delta in deltas for source in delta.sources],
        logprobs=list(chain.from_iterable(delta.logprobs or () for delta in deltas)),
        prompt_logprobs=first.prompt_logprobs,
        finish=last.finish,
        stop_reason=last.stop_reason,
    )
