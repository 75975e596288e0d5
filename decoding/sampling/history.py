"""A request's tokens as its processors see them. Knows nothing of logits or batches."""

from array import array
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from decoding.sampling.params import SamplingParams
from decoding.sampling.token_lists import TokenSet


class History:
    """The committed text of a request: prompt and answer. Indices of it are built on first use and updated lazily.

    Args:
        params: of the request.
        tokens: shared with their owner, who only appends.
        prompt_length: number of prompt tokens.
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
        """The counts of the text's distinct tokens."""
        return TokenCounts(self.tokens, self.prompt_length)

    @cached_property
    def ngrams(self) -> "NgramIndex":
        """The n-grams of the text, where n is the request's `no_repeat_ngram_size`."""
        return NgramIndex(self.tokens, self.params.no_repeat_ngram_size)


class Position(NamedTuple):
    """The position of a token to sample: after a request's text, or after draft tokens that follow it."""

    history: History
    path: Sequence[int] = ()  # draft tokens after the text
    allowed: Tensor | None = None  # [⌈V/32⌉] int32 on the CPU, a bit per token that the grammar allows

    @property
    def index(self) -> int:  # type: ignore[override]
        """The absolute position of the token."""
        return len(self.history.tokens) + len(self.path)

    @property
    def answer_length(self) -> int:
        """Number of answer tokens before the position."""
        return self.index - self.history.prompt_length

    def tail(self, count: int) -> list[int]:
        """Return the last `count` tokens before the position, or fewer if there are no more."""
        tokens, path = self.history.tokens, self.path
        return [*tokens[max(0, len(tokens) + len(path) - count) :], *path[max(0, len(path) - count) :]]


class TokenCounts:
    """The distinct tokens of a text, and their counts in the answer."""

    def __init__(self, tokens: Sequence[int], prompt_length: int) -> None:
        self._text, self._prompt_length, self._end = tokens, prompt_length, 0
        self._index: dict[int, int] = {}
        self._distinct = array("q")  # in order of their first appearance
        self._counts = array("f")  # their counts in the answer

    def with_path(self, path: Sequence[int]) -> "tuple[array[int], array[float]]":
        """Return the U distinct tokens of the text and a path after it, [U], and their counts in the answer, [U].

        Tokens that only the prompt has count 0.
        """
        self._catch_up()
        distinct, counts = self._distinct[:], self._counts[:]
        added: dict[int, int] = {}
        for token in path:
            known = self._index.get(token)
            index = added.setdefault(token, len(distinct)) if known is None else known
            if index == len(distinct):
                distinct.append(token)
                counts.append(0)
            counts[index] += 1
        return distinct, counts

    def _catch_up(self) -> None:
        for position in range(self._end, len(self._text)):
            token = self._text[position]
            index = self._index.setdefault(token, len(self._distinct))
            if index == len(self._distinct):
                self._distinct.append(token)
                self._counts.append(0)
            self._counts[index] += position >= self._prompt_length
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
    """The n-grams of a text, by their first n − 1 tokens."""

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        """size: n, at least 1."""
        self._text, self._size, self._end = tokens, size, size - 1
        self._attached_drafters: dict[tuple[int, ...], set[int]] = {}

    def attached_drafters(self, prefix: tuple[int, ...]) -> Collection[int]:
        """Return the tokens that have followed these n − 1 tokens."""
        for end in range(self._end, len(self._text)):
            context = tuple(self._text[end - self._size + 1 : end])
            self._attached_drafters.setdefault(context, set()).add(self._text[end])
        self._end = max(self._end, len(self._text))
        return self._attached_drafters.get(prefix, ())
