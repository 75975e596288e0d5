"""Phrases that must appear in an answer, and how far a text has come with them. Knows nothing of beams or scores.

Each word is a set of phrases of which one must appear, as tokens in a row. Words may overlap in the text.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

Progress = tuple[int, ...]  # of each word, the state of its automaton

_MET = -1
_ROOT = 0


class ForceWords:
    """The words of a request. Progress values are those that `start` and `after` give."""

    def __init__(self, words: Sequence[Sequence[Sequence[int]]]) -> None:
        """words: for each word its phrases, none of them empty."""
        self._words = [_Word(phrases) for phrases in words]
        self.start: Progress = (_ROOT,) * len(words)

    def after(self, progress: Progress, token: int) -> Progress:
        """The progress with one more token."""
        return tuple(word.after(state, token) for word, state in zip(self._words, progress, strict=True))

    def missing(self, progress: Progress) -> int:
        """How many tokens complete the words one after the other, each by the shortest way; 0: all are there."""
        return sum(word.missing(state) for word, state in zip(self._words, progress, strict=True))

    def wanted(self, progress: Progress) -> set[int]:
        """The tokens that begin or continue a phrase of a word that is not there yet."""
        pairs = zip(self._words, progress, strict=True)
        return set(chain.from_iterable(word.wanted(state) for word, state in pairs))


class _Word:
    """Aho and Corasick's automaton of one word's phrases (CACM 18, 1975): states are the phrases' beginnings."""

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._shortest = [min(map(len, phrases))]  # from each state, tokens to the nearest end below it
        for phrase in phrases:
            self._insert(phrase)
        self._shorter = [_ROOT] * len(self._children)  # the longest proper end of each state that is a state, too
        self._link()

    def _insert(self, phrase: Sequence[int]) -> None:
        state = _ROOT
        for left, token in zip(range(len(phrase) - 1, -1, -1), phrase, strict=True):
            if token not in self._children[state]:
                self._children[state][token] = len(self._children)
                self._children.append({})
                self._shortest.append(left)
            state = self._children[state][token]
            self._shortest[state] = min(self._shortest[state], left)

    def _link(self) -> None:
        """Breadth first, so that shorter states have their links before longer ones need them."""
        queue = deque(self._children[_ROOT].values())
        while queue:
            state = queue.popleft()
            for token, child in self._children[state].items():
                self._shorter[child] = self._step(self._shorter[state], token)
                queue.append(child)

    def _step(self, state: int, token: int) -> int:
        return next((self._children[at][token] for at in self._ends(state) if token in self._children[at]), _ROOT)

    def _ends(self, state: int) -> Iterator[int]:
        """The state and its shorter ends, down to the empty one."""
        while state != _ROOT:
            yield state
            state = self._shorter[state]
        yield _ROOT

    def after(self, state: int, token: int) -> int:
        if state == _MET:
            return _MET
        state = self._step(state, token)
        return _MET if self.missing(state) == 0 else state

    def missing(self, state: int) -> int:
        return 0 if state == _MET else min(self._shortest[end] for end in self._ends(state))

    def wanted(self, state: int) -> Iterator[int]:
        return iter(()) if state == _MET else chain.from_iterable(self._children[end] for end in self._ends(state))
