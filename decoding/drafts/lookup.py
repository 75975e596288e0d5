"""What drafts without a model share: chains copied from a text, and how probable they are by the match before them."""

from collections.abc import Sequence
from typing import NamedTuple

from decoding.drafts.draft import NO_DRAFT, Draft, ProposerName, TokenTree

_LONGEST = 16  # longer matches count as matches of this length
_DECAY = 0.998  # weight of an observation after the next one of its length
_PRIOR_TOKENS = 8.0  # the prior counts as so many observations
_MOST_NEW = 256  # tokens that a proposal reads, more than a step commits; a long text is read before


class MatchCalibration:
    """The probability that a draft token is right if those before it are, by the length of the match before it."""

    def __init__(self) -> None:
        self._right = [_PRIOR_TOKENS * (1 - 0.7**length) for length in range(_LONGEST + 1)]
        self._seen = [_PRIOR_TOKENS] * (_LONGEST + 1)

    def probability(self, length: int) -> float:
        """Return the probability of a token after a match of this length."""
        index = min(length, _LONGEST)
        return self._right[index] / self._seen[index]

    def note(self, length: int, *, right: bool) -> None:
        index = min(length, _LONGEST)
        self._right[index] = _DECAY * self._right[index] + right
        self._seen[index] = _DECAY * self._seen[index] + 1


class Copy(NamedTuple):
    """A chain of tokens that may go on from the text."""

    tokens: list[int]
    length: int  # of the match before it


class Lookup:
    """Drafts for one request what followed its last tokens elsewhere."""

    name: ProposerName

    def __init__(self, calibration: MatchCalibration) -> None:
        """calibration: of this kind of look-up; may be shared by requests."""
        self._calibration = calibration
        self._start = 0  # position of the first token of the copies
        self._copies: list[Copy] = []  # that were proposed last

    def read(self, tokens: Sequence[int], most: int) -> int:
        """Read at most so many new tokens of the text. Returns how many."""
        raise NotImplementedError

    def find(self, tokens: Sequence[int]) -> list[Copy] | None:
        """Return chains that may follow the text, the likeliest first; None while some of it is still to be read."""
        raise NotImplementedError

    def propose(self, tokens: Sequence[int]) -> Draft:
        """Propose a tree of chains; empty if nothing matches.

        Empty, too, while a part of the text is still to be read: drafts depend on the text alone.
        """
        for copy in self._copies:
            self._learn(copy, tokens)
        self.read(tokens, _MOST_NEW)
        copies = self.find(tokens)
        self._start, self._copies = len(tokens), copies or []
        tree = TokenTree()
        for copy in self._copies:
            lengths = range(copy.length, copy.length + len(copy.tokens))
            tree.add(copy.tokens, [self._calibration.probability(length) for length in lengths])
        return tree.draft if tree else NO_DRAFT

    def _learn(self, copy: Copy, text: Sequence[int]) -> None:
        committed = text[self._start : self._start + len(copy.tokens)]
        for length, (token, right) in enumerate(zip(copy.tokens, committed, strict=False), copy.length):
            self._calibration.note(length, right=token == right)
            if token != right:
                break
