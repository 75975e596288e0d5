"""When a text ends: EOS and length on token ids (the target's side), stop strings on text (the coordinator's)."""

from collections.abc import Collection, Sequence
from typing import Literal

FinishReason = Literal["stop", "length"]


def cut_at_stop(
    tokens: Sequence[int], generated: int, *, end_token_ids: Collection[int], max_tokens: int
) -> tuple[list[int], FinishReason | None]:
    """The part of a step's tokens that belongs to the text, and why the text ends there, if it does.

    Args:
        tokens: what the step would commit.
        generated: how many output tokens were committed before.
        end_token_ids: after which the text ends; they are committed themselves.
        max_tokens: most output tokens.
    """
    kept: list[int] = []
    for token in tokens:
        kept.append(token)
        if token in end_token_ids:
            return kept, "stop"
        if generated + len(kept) >= max_tokens:
            return kept, "length"
    return kept, None


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, and holds back what could still become one."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """include: show the stop string itself too."""
        self._stop = tuple(stop)
        self._include = include
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that was found, with or before which the text ends."""
        self._held += text
        found = [(at + len(s), at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            end, at, stop = min(found)  # the first to be complete, so that the size of the pieces doesn't matter
            safe, self._held = self._held[: end if self._include else at], ""
            return safe, stop
        keep = self._partial_match()
        safe, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return safe, None

    def flush(self) -> str:
        """The text that was held back, at the end of a stream in which no stop string came."""
        held, self._held = self._held, ""
        return held

    def _partial_match(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0
