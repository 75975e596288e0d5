"""A request's tokens as its processors see them. Knows nothing of logits or batches."""

from array import array
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from decoding.params import SamplingParams
from decoding.token_lists import TokenSet


class History:
    """The text that a request has so far: its prompt and its committed answer.

    What processors derive from it is made when one first asks for it, and catches up with the tokens whenever one asks
    again.

    Args:
        params: what the request asks for.
        tokens: shared with its owner, who only ever appends to it.
        prompt_length: how many of the tokens are the prompt's.
    """

    def __init__(self, params: SamplingParams, tokens: list[int], prompt_length: int) -> None:
        self.params, self.tokens, self.prompt_length = params, tokens, prompt_length

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens after which the answer ends."""
        return frozenset(self.params.end_token_ids)

    @cached_property
    def ends(self) -> TokenSet:
        """The same."""
        return TokenSet(self.end_token_ids)

    @cached_property
    def biases(self) -> TokenSet:
        """What is added to which tokens' logits; of a token that is named twice, the later number."""
        biases = dict(self.params.logit_bias)
        return TokenSet(biases.keys(), biases.values())

    @cached_property
    def allowed(self) -> TokenSet:
        """Tokens outside of which nothing may come; empty: anything may."""
        return TokenSet(self.params.allowed_token_ids)

    @cached_property
    def suppressed(self) -> TokenSet:
        """Tokens that may come nowhere."""
        return TokenSet(self.params.suppress_tokens)

    @cached_property
    def suppressed_at_first(self) -> TokenSet:
        """Tokens that may not begin the answer."""
        return TokenSet(self.params.begin_suppress_tokens)

    @cached_property
    def bad_tokens(self) -> TokenSet:
        """Bad words of one token; an end-of-text token alone is none."""
        words = self.params.bad_words_ids
        return TokenSet(word[0] for word in words if len(word) == 1 and word[0] not in self.params.eos_token_ids)

    @cached_property
    def bad_words(self) -> "WordIndex":
        """Those of more."""
        return WordIndex(word for word in self.params.bad_words_ids if len(word) > 1)

    @cached_property
    def counts(self) -> "TokenCounts":
        """Which tokens there are."""
        return TokenCounts(self.tokens, self.prompt_length)

    @cached_property
    def ngrams(self) -> "NgramIndex":
        """What has come after each n − 1 tokens, n being the request's `no_repeat_ngram_size`."""
        return NgramIndex(self.tokens, self.params.no_repeat_ngram_size)


class Position(NamedTuple):
    """A token to be sampled: after a request's text, or after draft tokens that may come to follow it."""

    history: History
    path: Sequence[int] = ()  # draft tokens after the text
    allowed: Tensor | None = None  # [⌈V/32⌉] int32 on the CPU, a bit per token: set if the grammar allows it

    @property
    def index(self) -> int:  # type: ignore[override]
        """The absolute position of the token."""
        return len(self.history.tokens) + len(self.path)

    @property
    def answered(self) -> int:
        """How many tokens of the answer come before it."""
        return self.index - self.history.prompt_length

    def tail(self, count: int) -> list[int]:
        """The last tokens before it: `count`, or fewer if there are no more."""
        tokens, path = self.history.tokens, self.path
        return [*tokens[max(0, len(tokens) + len(path) - count) :], *path[max(0, len(path) - count) :]]


class TokenCounts:
    """The distinct tokens of a text, and how often the answer has each."""

    def __init__(self, tokens: Sequence[int], prompt_length: int) -> None:
        self._text, self._prompt_length, self._end = tokens, prompt_length, 0
        self._place: dict[int, int] = {}
        self._distinct = array("q")  # in order of their first appearance
        self._counts = array("f")  # of each, in the answer

    def after(self, path: Sequence[int]) -> "tuple[array[int], array[float]]":
        """The distinct tokens of the text with a path after it, U of them, and how often its answer has each: [U], [U].

        The tokens that only the prompt has come with 0.
        """
        self._catch_up()
        distinct, counts = self._distinct[:], self._counts[:]
        added: dict[int, int] = {}
        for token in path:
            known = self._place.get(token)
            place = added.setdefault(token, len(distinct)) if known is None else known
            if place == len(distinct):
                distinct.append(token)
                counts.append(0)
            counts[place] += 1
        return distinct, counts

    def _catch_up(self) -> None:
        for at in range(self._end, len(self._text)):
            place = self._place.setdefault(self._text[at], len(self._distinct))
            if place == len(self._distinct):
                self._distinct.append(self._text[at])
                self._counts.append(0)
            self._counts[place] += at >= self._prompt_length
        self._end = len(self._text)


class WordIndex:
    """The last tokens of words, by all tokens before them."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: of at least two tokens."""
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *before, last in words:
            self._last.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._last})

    def completing(self, position: Position) -> list[int]:
        """The tokens that would complete a word at the position."""
        recent = tuple(position.tail(self._lengths[-1])) if self._lengths else ()
        tails = (recent[len(recent) - length :] for length in self._lengths if length <= len(recent))
        return [last for tail in tails for last in self._last.get(tail, ())]


class NgramIndex:
    """The tokens that have come after each n − 1 tokens of a text."""

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        """size: n, at least 1."""
        self._text, self._size, self._end = tokens, size, size - 1
        self._followers: dict[tuple[int, ...], set[int]] = {}

    def after(self, prefix: tuple[int, ...]) -> Collection[int]:
        """What has come after these tokens, n − 1 of them."""
        for end in range(self._end, len(self._text)):
            before = tuple(self._text[end - self._size + 1 : end])
            self._followers.setdefault(before, set()).add(self._text[end])
        self._end = max(self._end, len(self._text))
        return self._followers.get(prefix, ())
