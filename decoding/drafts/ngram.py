"""Drafts without a model, copied from the request's own text: what followed its last tokens the last time."""

from collections.abc import Sequence

from decoding.drafts.draft import ProposerName
from decoding.drafts.lookup import Copy, Lookup, MatchCalibration
from decoding.kernels.matches import MatchIndex


class NgramLookup(Lookup):
    """Drafts what followed the last occurrence of the text's last n tokens, for the largest n."""

    name: ProposerName = "ngram"

    def __init__(
        self, longest: int, *, capacity: int, draft_length: int = 8, calibration: MatchCalibration | None = None
    ) -> None:
        """
        longest: the longest n-gram to look for.
        capacity: the most tokens of the text.
        """
        super().__init__(calibration or MatchCalibration())
        self._index = MatchIndex(capacity, longest)
        self._draft_length = draft_length

    def read(self, tokens: Sequence[int], most: int) -> int:
        """Index at most so many new tokens, but not the text's last one."""
        start = len(self._index)
        new = tokens[start : min(start + most, len(tokens) - 1)]
        self._index.add(new)
        return len(new)

    def find(self, tokens: Sequence[int]) -> list[Copy] | None:
        if len(self._index) < len(tokens) - 1:
            return None
        length, end, _ = self._index.find(tokens)
        chain: list[int] = []
        for index in range(end, end + self._draft_length if length else end):  # which goes on as part of the text
            chain.append(tokens[index] if index < len(tokens) else chain[index - len(tokens)])
        return [Copy(chain, length)]
