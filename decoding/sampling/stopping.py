"""When an answer ends: the target checks end tokens and length, the coordinator checks stop strings."""

from collections.abc import Sequence, Set
from typing import Literal

FinishReason = Literal["stop", "length"]


def cut_at_stop(
    tokens: Sequence[int], generated: int, *, end_token_ids: Set[int], max_tokens: int
) -> tuple[list[int], FinishReason | None]:
    """Return the tokens of a step that belong to the answer, and the reason if the answer ends with them.

    Args:
        tokens: tokens that the step would commit.
        generated: number of answer tokens committed before.
        end_token_ids: tokens that end the answer; they are committed too.
        max_tokens: maximum number of answer tokens.
    """
    if generated + len(tokens) < max_tokens and end_token_ids.isdisjoint(tokens):  # as in most steps
        return list(tokens), None
    kept: list[int] = []
    for token in tokens:
        kept.append(token)
        if token in end_token_ids:
            return kept, "stop"
        if generated + len(kept) >= max_tokens:
            return kept, "length"
    return kept, None


class StopStrings:
    """Finds the first stop string in streamed text. Holds back text that could be the start of one."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """include: keep the stop string in the text."""
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self._passed = 0  # number of characters of `_held` at which no stop string may end

    def add(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Add text. Returns the text that is safe to show, and the stop string that ends it, if any.

        may_end: whether a stop string counts that ends in the text, wherever it begins.
        """
        self._held += text
        if not may_end:
            self._passed = len(self._held)
        matches = [(start + len(s), start, s) for s in self._stop if (start := self._find(s)) >= 0]
        if matches:
            end, start, stop = min(matches)  # the first to end, however the text is split into deltas
            safe, self._held = self._held[: end if self._include else start], ""
            return safe, stop
        keep = self._partial_match()
        safe, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._passed = max(0, self._passed - len(safe))
        return safe, None

    def _find(self, stop: str) -> int:
        return self._held.find(stop, max(0, self._passed - len(stop) + 1))

    def flush(self) -> str:
        """Return the text held back, at the end of a stream without a stop string."""
        held, self._held = self._held, ""
        return held

    def _partial_match(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0
