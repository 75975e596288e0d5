"""Drafts without a model: n-gram look-up in the request's own text and in earlier answers.

What followed the last occurrence of the text's last n tokens is drafted, for the largest n. A store shared by many
requests counts which tokens followed which.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from decoding.drafts.draft import NO_DRAFT, Draft, ProposerName, TokenTree
from decoding.drafts.lookup import Lookup, MatchCalibration

_MAX_CONTINUATIONS = 8  # distinct tokens counted after one context
_MOST_NEW = 256  # tokens that a proposal indexes, more than a step commits; a long text is read before
_MOST_COMPARED = 256  # earlier occurrences of a text's last two tokens


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Options of n-gram look-up. longest: the longest n-gram to look for."""

    longest: int = 4
    shared: bool = False  # also use earlier answers of other requests, and share this one


class TextIndex:
    """Finds where a growing text's last tokens occurred before. Its memory is that of its distinct pairs of tokens."""

    def __init__(self, longest: int) -> None:
        """longest: the most tokens to compare."""
        self._longest = longest
        self._ends: dict[int, int] = {}  # by token: the position after its last occurrence
        self._pair_ends: dict[int, int] = {}  # the same by `_pair`
        self._earlier_ends = array("i", [0])  # by such a position: the one of the same pair before; 0: none
        self._last = -1  # the last token in the index

    def update(self, tokens: Sequence[int], most: int) -> int:
        """Index at most so many new tokens, but not the text's last one. Returns how many were new."""
        start = len(self._earlier_ends) - 1
        for end, token in enumerate(tokens[start : min(start + most, len(tokens) - 1)], start + 1):
            pair = _pair(self._last, token)
            self._earlier_ends.append(self._pair_ends.get(pair, 0))
            self._ends[token] = self._pair_ends[pair] = end
            self._last = token
        return len(self._earlier_ends) - 1 - start

    def is_complete(self, tokens: Sequence[int]) -> bool:
        return len(self._earlier_ends) == len(tokens)

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the length of the longest suffix that occurred before, and its last end; (0, 0): none did.

        Of more than _MOST_COMPARED occurrences of the last two tokens the last are compared. tokens: as in `update`.
        """
        end = self._ends.get(tokens[-1], 0)
        if not end:
            return 0, 0
        length = 1
        candidate = self._pair_ends.get(_pair(*tokens[-2:]), 0) if len(tokens) > 1 else 0
        for _ in range(_MOST_COMPARED):
            if not candidate or length == self._longest:
                break
            # Most candidates can't be longer: this rules them out at once.
            if length < 2 or (candidate > length and tokens[candidate - 1 - length] == tokens[-1 - length]):
                matched = self._matched(tokens, candidate)
                if matched > length:
                    length, end = matched, candidate
            candidate = self._earlier_ends[candidate]
        return length, end

    def _matched(self, tokens: Sequence[int], end: int) -> int:
        """Return how many tokens before a position are the text's last ones. At least two are."""
        most = min(self._longest, end)
        return next((length for length in range(2, most) if tokens[end - 1 - length] != tokens[-1 - length]), most)


def _pair(first: int, second: int) -> int:
    return first << 32 | second


class NgramStore:
    """Counts of the tokens that followed contexts of at most `longest` tokens in earlier answers."""

    def __init__(self, longest: int = 4, *, capacity: int = 200_000) -> None:
        """capacity: maximum number of contexts; the least recently used are evicted."""
        self.longest = longest
        self.calibration = MatchCalibration()
        self._capacity = capacity
        self._counts: OrderedDict[tuple[int, ...], dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Count the tokens of a text from `start` on; those before are context."""
        for index in range(max(start, 1), len(tokens)):
            for length in range(1, min(self.longest, index) + 1):
                self._count(tuple(tokens[index - length : index]), tokens[index])
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def continuations(self, tokens: Sequence[int], count: int) -> tuple[int, list[int]]:
        """Return the length of the longest known context at the end, and the tokens that most often followed it."""
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
        if token not in counts and len(counts) == _MAX_CONTINUATIONS:
            del counts[min(counts, key=counts.__getitem__)]
        counts[token] = counts.get(token, 0) + 1


class _Guess(NamedTuple):
    """A proposed chain, to be compared with the committed tokens."""

    start: int  # position of its first token
    tokens: list[int]
    lengths: list[int]  # of the match before each token
    calibration: MatchCalibration

    def learn(self, text: Sequence[int]) -> None:
        for committed, token, length in zip(text[self.start :], self.tokens, self.lengths, strict=False):
            self.calibration.note(length, right=committed == token)
            if committed != token:
                break

    def probabilities(self) -> list[float]:
        return [self.calibration.probability(length) for length in self.lengths]


class NgramProposer(Lookup):
    """Looks up drafts for one request."""

    name: ProposerName = "ngram"

    def __init__(
        self,
        longest: int = 4,
        *,
        draft_length: int = 8,
        calibration: MatchCalibration | None = None,
        store: NgramStore | None = None,
    ) -> None:
        """
        longest: the longest n-gram to look for.
        draft_length: maximum length of a chain.
        calibration: of look-ups in the text; may be shared by requests.
        store: earlier answers, to which the new tokens of the text are added.
        """
        self._index = TextIndex(longest)
        self._draft_length = draft_length
        self._calibration = calibration or MatchCalibration()
        self._store = store
        self._known = 0  # length of the text at the last call
        self._guesses: list[_Guess] = []

    def read(self, tokens: Sequence[int], most: int) -> int:
        """Index at most so many tokens of the text. Returns how many."""
        return self._index.update(tokens, most)

    def propose(self, tokens: Sequence[int]) -> Draft:
        """Propose a chain from the text and one from the store, as a tree; empty if there is no match.

        Empty, too, while a part of the text is still to be indexed: drafts depend on the text alone.
        """
        for guess in self._guesses:
            guess.learn(tokens)
        self._guesses = []
        self._index.update(tokens, _MOST_NEW)
        if not self._index.is_complete(tokens):
            return NO_DRAFT
        self._guesses = [self._look_up(tokens)]
        if self._store is not None:
            if self._known:  # the first call has the prompt, which is private
                self._store.add(tokens, self._known)
            self._guesses.append(self._recall(tokens, self._store))
        self._known = len(tokens)
        tree = TokenTree()
        for guess in self._guesses:
            tree.add(guess.tokens, guess.probabilities())
        return tree.draft

    def _look_up(self, tokens: Sequence[int]) -> _Guess:
        length, end = self._index.match(tokens)
        count = self._draft_length if length else 0
        chain: list[int] = []
        for index in range(end, end + count):
            chain.append(tokens[index] if index < len(tokens) else chain[index - len(tokens)])
        return _Guess(len(tokens), chain, list(range(length, length + count)), self._calibration)

    def _recall(self, tokens: Sequence[int], store: NgramStore) -> _Guess:
        """Choose the most frequent continuation, token by token."""
        context = list(tokens[-store.longest :])
        chain: list[int] = []
        lengths: list[int] = []
        while len(chain) < self._draft_length:
            length, continuations = store.continuations(context, 1)
            if not continuations:
                break
            chain += continuations
            lengths.append(length)
            context = [*context, *continuations][-store.longest :]
        return _Guess(len(tokens), chain, lengths, store.calibration)
