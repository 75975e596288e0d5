"""Drafts without a model: what came after the same tokens before, in the request's own text or in earlier answers.

Prompt look-up continues as the text did where its last n tokens occurred last, for the largest n. A store, shared by
many requests, counts which tokens followed which, and forgets the contexts that were used longest ago. It knows nothing
of models, text or requests: token ids only.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from decoding.drafts import Draft
from decoding.token_tree import TokenTree

_LONGEST = 16  # matches at least as long count as equally good
_FORGETTING = 0.998  # what an observation still counts, one observation of its length later
_PRIOR_TOKENS = 8.0  # how many observations the prior is worth
_FOLLOWERS = 8  # different tokens that are counted after one context


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """How a request's drafts are looked up. longest: the longest run of tokens to look for."""

    longest: int = 4
    shared: bool = False  # look in earlier answers of other requests too, and let them look in this one


class MatchCalibration:
    """How often a draft token is right, should those above be, by the length of the match that it continues."""

    def __init__(self) -> None:
        self._right = [_PRIOR_TOKENS * (1 - 0.7**length) for length in range(_LONGEST + 1)]
        self._seen = [_PRIOR_TOKENS] * (_LONGEST + 1)

    def probability(self, length: int) -> float:
        at = min(length, _LONGEST)
        return self._right[at] / self._seen[at]

    def note(self, length: int, *, right: bool) -> None:
        """Count what became of one draft token."""
        at = min(length, _LONGEST)
        self._right[at] = _FORGETTING * self._right[at] + right
        self._seen[at] = _FORGETTING * self._seen[at] + 1


class TextIndex:
    """Where each run of at most `longest` tokens of a growing text ended last, before the text's own end."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # ends up to here are in the index

    def update(self, tokens: Sequence[int]) -> None:
        """Take in what the text has grown by since the last call."""
        for end in range(self._indexed + 1, len(tokens)):
            for length in range(1, min(self._longest, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The most of the text's last tokens that occurred before, and where they ended last; (0, 0): none did."""
        for length in range(min(self._longest, len(tokens)), 0, -1):
            end = self._ends.get(tuple(tokens[-length:]))
            if end is not None:
                return length, end
        return 0, 0


class NgramStore:
    """Counts of what followed at most `longest` tokens, in all answers it was told of."""

    def __init__(self, longest: int = 4, *, capacity: int = 200_000) -> None:
        """capacity: contexts that it holds; those used longest ago go first."""
        self.longest = longest
        self.calibration = MatchCalibration()
        self._capacity = capacity
        self._counts: OrderedDict[tuple[int, ...], dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Count the tokens of a text from `start` on; those before are context."""
        for at in range(max(start, 1), len(tokens)):
            for length in range(1, min(self.longest, at) + 1):
                self._count(tuple(tokens[at - length : at]), tokens[at])
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def after(self, tokens: Sequence[int], count: int) -> tuple[int, list[int]]:
        """How many of the last tokens are known as a context, and what followed them, the most frequent first."""
        for length in range(min(self.longest, len(tokens)), 0, -1):
            context = tuple(tokens[-length:])
            counts = self._counts.get(context)
            if counts is not None:
                self._counts.move_to_end(context)
                return length, sorted(counts, key=counts.__getitem__, reverse=True)[:count]
        return 0, []

    def _count(self, context: tuple[int, ...], token: int) -> None:
        counts = self._counts.setdefault(context, {})
        self._counts.move_to_end(context)
        if token not in counts and len(counts) == _FOLLOWERS:
            del counts[min(counts, key=counts.__getitem__)]
        counts[token] = counts.get(token, 0) + 1


class _Guess(NamedTuple):
    """A chain that was proposed, to be compared with what came."""

    start: int  # position of its first token
    tokens: list[int]
    lengths: list[int]  # of the matches that each token continues
    calibration: MatchCalibration

    def learn(self, text: Sequence[int]) -> None:
        for came, token, length in zip(text[self.start :], self.tokens, self.lengths, strict=False):
            self.calibration.note(length, right=came == token)
            if came != token:
                break

    def probabilities(self) -> list[float]:
        return [self.calibration.probability(length) for length in self.lengths]


class NgramProposers:
    """Makes the proposers of one target's requests, which learn from each other how far to trust a match."""

    def __init__(self) -> None:
        self._calibration = MatchCalibration()
        self._store = NgramStore()

    def make(self, options: NgramOptions, draft_length: int, *, rejects: bool = False) -> "NgramProposer":
        """One request's.

        rejects: drafts are verified by rejection sampling, so what answers to the same seed were must not come in.
        """
        return NgramProposer(
            options.longest,
            draft_length=draft_length,
            calibration=self._calibration,
            store=self._store if options.shared and not rejects else None,
        )


class NgramProposer:
    """Looks drafts up for one request, as `decoding.proposers.Proposer` wants it."""

    def __init__(
        self,
        longest: int = 4,
        *,
        draft_length: int = 8,
        calibration: MatchCalibration | None = None,
        store: NgramStore | None = None,
    ) -> None:
        """
        longest: the longest run of tokens to look for.
        draft_length: the most tokens of a chain.
        calibration: of look-ups in the text; shared by many requests, it has more to learn from.
        store: where to look, too; what the text grows by is added to it.
        """
        self._index = TextIndex(longest)
        self._draft_length = draft_length
        self._calibration = calibration or MatchCalibration()
        self._store = store
        self._known = 0  # tokens of the text, at the last call
        self._guesses: list[_Guess] = []

    def propose(self, tokens: Sequence[int], hidden: Tensor | None = None) -> Draft:
        """A chain from the text and one from the store, merged where they agree; empty if nothing was found."""
        for guess in self._guesses:
            guess.learn(tokens)
        self._index.update(tokens)
        self._guesses = [self._look_up(tokens)]
        if self._store is not None:
            if self._known:  # what was there at first is the prompt, which is nobody else's business
                self._store.add(tokens, self._known)
            self._guesses.append(self._recall(tokens, self._store))
        self._known = len(tokens)
        tree = TokenTree()
        for guess in self._guesses:
            tree.add(guess.tokens, guess.probabilities())
        return tree.draft

    def _look_up(self, tokens: Sequence[int]) -> _Guess:
        """The text as it went on after the last match; beyond its end, as the draft does."""
        length, end = self._index.match(tokens)
        count = self._draft_length if length else 0
        chain: list[int] = []
        for at in range(end, end + count):
            chain.append(tokens[at] if at < len(tokens) else chain[at - len(tokens)])
        return _Guess(len(tokens), chain, list(range(length, length + count)), self._calibration)

    def _recall(self, tokens: Sequence[int], store: NgramStore) -> _Guess:
        """What followed most often, token by token."""
        context = list(tokens[-store.longest :])
        chain: list[int] = []
        lengths: list[int] = []
        while len(chain) < self._draft_length:
            length, followers = store.after(context, 1)
            if not followers:
                break
            chain += followers
            lengths.append(length)
            context = [*context, *followers][-store.longest :]
        return _Guess(len(tokens), chain, lengths, store.calibration)
