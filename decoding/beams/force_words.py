"""Forced words of an answer, and the progress of a text with them. Knows nothing of beams or scores.

A word is a set of phrases, one of which must appear as consecutive tokens. Words may overlap in the text.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

WordProgress = tuple[int, ...]  # the state of each word's automaton

_MET = -1
_ROOT = 0


class ForceWords:
    """The forced words of a request. `start` and `advance` make progress values."""

    def __init__(self, words: Sequence[Sequence[Sequence[int]]]) -> None:
        """words: the phrases of each word, none of them empty."""
        self._words = [_Word(phrases) for phrases in words]
        self.start: WordProgress = (_ROOT,) * len(words)

    def advance(self, progress: WordProgress, token: int) -> WordProgress:
        """Return the progress after one more token."""
        return tuple(word.advance(state, token) for word, state in zip(self._words, progress, strict=True))

    def missing_count(self, progress: WordProgress) -> int:
        """Return the number of tokens that complete the words one by one; 0: all words appear."""
        return sum(word.missing_count(state) for word, state in zip(self._words, progress, strict=True))

    def next_tokens(self, progress: WordProgress) -> set[int]:
        """Return the tokens that begin or continue a phrase of a missing word."""
        pairs = zip(self._words, progress, strict=True)
        return set(chain.from_iterable(word.next_tokens(state) for word, state in pairs))


class _Word:
    """The Aho–Corasick automaton of one word's phrases (CACM 18, 1975). Its states are prefixes of phrases."""

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._shortest = [min(map(len, phrases))]  # tokens from each state to the nearest end of a phrase
        for phrase in phrases:
            self._insert(phrase)
        self._suffix = [_ROOT] * len(self._children)  # suffix links: each state's longest proper suffix that is a state
        self._link()

    def _insert(self, phrase: Sequence[int]) -> None:
        state = _ROOT
        for remaining, token in zip(range(len(phrase) - 1, -1, -1), phrase, strict=True):
            if token not in self._children[state]:
                self._children[state][token] = len(self._children)
                self._children.append({})
                self._shortest.append(remaining)
            state = self._children[state][token]
            self._shortest[state] = min(self._shortest[state], remaining)

    def _link(self) -> None:
        """Set suffix links breadth first, because longer states need those of shorter ones."""
        queue = deque(self._children[_ROOT].values())
        while queue:
            state = queue.popleft()
            for token, child in self._children[state].items():
                self._suffix[child] = self._step(self._suffix[state], token)
                queue.append(child)

    def _step(self, state: int, token: int) -> int:
        suffixes = self._suffixes(state)
        return next((self._children[suffix][token] for suffix in suffixes if token in self._children[suffix]), _ROOT)

    def _suffixes(self, state: int) -> Iterator[int]:
        """Yield the state and its suffixes, down to the root."""
        while state != _ROOT:
            yield state
            state = self._suffix[state]
        yield _ROOT

    def advance(self, state: int, token: int) -> int:
        if state == _MET:
            return _MET
        state = self._step(state, token)
        return _MET if self.missing_count(state) == 0 else state

    def missing_count(self, state: int) -> int:
        return 0 if state == _MET else min(self._shortest[suffix] for suffix in self._suffixes(state))

    def next_tokens(self, state: int) -> Iterator[int]:
        suffixes = () if state == _MET else self._suffixes(state)
        return chain.from_iterable(self._children[suffix] for suffix in suffixes)
