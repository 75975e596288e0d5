"""A request's text as its logits processors see it."""

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

from torch import Tensor

from decoding.sampling.noise_keys import stream_key
from decoding.sampling.params import SamplingParams, Traits
from decoding.sampling.transfer import TokenSet

_SLICE = 2048  # tokens


class History:
    """The committed text of a request: prompt and answer. Its indices are built on first use and updated lazily.

    Args:
        params: the request's parameters.
        tokens: prompt and answer, shared with the owner, who only appends.
        prompt_length: number of prompt tokens.
    """

    def __init__(self, params: SamplingParams, tokens: list[int], prompt_length: int) -> None:
        self.params, self.tokens, self.prompt_length = params, tokens, prompt_length

    @cached_property
    def traits(self) -> Traits:
        """Which processors act."""
        return self.params.traits

    @cached_property
    def settings(self) -> bytes:
        """[6] float64: temperature, top_k, top_p, min_p, and the part of the noise keys that all positions share."""
        params = self.params
        values = params.temperature, params.top_k, params.top_p, params.min_p
        return array("d", (*values, *stream_key(params.seed))).tobytes()

    @cached_property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence penalty."""
        return self.params.repetition_penalty, self.params.frequency_penalty, self.params.presence_penalty

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens after which the answer ends."""
        return frozenset(self.params.end_token_ids)

    @cached_property
    def end_tokens(self) -> TokenSet:
        """`end_token_ids` as a token set."""
        return TokenSet(self.end_token_ids)

    @cached_property
    def biases(self) -> TokenSet:
        """`logit_bias`. If it names a token twice, the later bias counts."""
        biases = dict(self.params.logit_bias)
        return TokenSet(biases.keys(), biases.values())

    @cached_property
    def allowed(self) -> TokenSet:
        """The only tokens allowed; empty: all are."""
        return TokenSet(self.params.allowed_token_ids)

    @cached_property
    def suppressed(self) -> TokenSet:
        """Tokens that are forbidden everywhere."""
        return TokenSet(self.params.suppress_tokens)

    @cached_property
    def begin_suppressed(self) -> TokenSet:
        """Tokens that are forbidden at the start of the answer."""
        return TokenSet(self.params.begin_suppress_tokens)

    @cached_property
    def bad_tokens(self) -> TokenSet:
        """Bad words of one token, without end-of-text tokens."""
        words = self.params.bad_words_ids
        return TokenSet(word[0] for word in words if len(word) == 1 and word[0] not in self.params.eos_token_ids)

    @cached_property
    def bad_words(self) -> "WordIndex":
        """Bad words of several tokens."""
        return WordIndex(word for word in self.params.bad_words_ids if len(word) > 1)

    @cached_property
    def ngrams(self) -> "NgramIndex":
        """The n-grams of the text; n is the request's `no_repeat_ngram_size`."""
        return NgramIndex(self.tokens, self.params.no_repeat_ngram_size)

    def read_ahead(self) -> None:
        """Index a slice of the text if steps will need it: the first one should not have to index a long prompt."""
        if self.params.no_repeat_ngram_size:
            self.ngrams.update(_SLICE)


class Position(NamedTuple):
    """The position of a token to sample: after the text of a request, or after draft tokens that follow the text."""

    history: History
    path: Sequence[int] = ()  # draft tokens after the text
    allowed: Tensor | None = None  # [⌈V/32⌉] int32 on the CPU, a bit per token that the grammar allows

    @property
    def index(self) -> int:  # type: ignore[override]
        """Absolute position of the token."""
        return len(self.history.tokens) + len(self.path)

    @property
    def answer_length(self) -> int:
        """Number of answer tokens before the position."""
        return self.index - self.history.prompt_length

    def tail(self, count: int) -> list[int]:
        """Return the last `count` tokens before the position, or fewer if there are no more."""
        tokens, path = self.history.tokens, self.path
        return [*tokens[max(0, len(tokens) + len(path) - count) :], *path[max(0, len(path) - count) :]]


def _no_paths() -> Sequence[Sequence[int]]:
    return ((),)


class Positions(NamedTuple):
    """Positions of one request: after its text, or after draft tokens that follow the text."""

    history: History
    depths: Sequence[int] = (0,)  # [n] the number of draft tokens before each
    paths: Callable[[], Sequence[Sequence[int]]] = _no_paths  # [n] these tokens, computed where a processor needs them
    allowed: Sequence[Tensor | None] | Tensor | None = None  # [n] or [n, ⌈V/32⌉] int32 on the CPU, see `Position`

    @classmethod
    def gather(cls, positions: Sequence[Position]) -> "Positions":
        """Join the positions of one request."""
        paths = [position.path for position in positions]
        allowed = [position.allowed for position in positions]
        return cls(
            positions[0].history,
            [*map(len, paths)],
            lambda: paths,
            allowed if any(mask is not None for mask in allowed) else None,
        )

    def singly(self) -> Iterator[Position]:
        """Yield each position by itself."""
        allowed = repeat(None) if self.allowed is None else self.allowed
        yield from map(Position, repeat(self.history), self.paths(), allowed)


class WordIndex:
    """Finds the tokens that complete a word, given the tokens before."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: token sequences, each of at least two tokens."""
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *before, last in words:
            self._last.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._last})

    def last_tokens(self, position: Position) -> list[int]:
        """Return the tokens that would complete a word at the position."""
        recent = tuple(position.tail(self._lengths[-1])) if self._lengths else ()
        tails = (recent[len(recent) - length :] for length in self._lengths if length <= len(recent))
        return [last for tail in tails for last in self._last.get(tail, ())]


class NgramIndex:
    """The last tokens of a text's n-grams, by their first n − 1 tokens."""

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        """size: n, at least 1."""
        self._text, self._size, self._end = tokens, size, size - 1
        self._continuations: dict[tuple[int, ...], set[int]] = {}

    def update(self, most: int) -> None:
        """Index at most so many tokens that are new."""
        start, self._end = self._end, max(self._end, min(self._end + most, len(self._text)))
        for end in range(start, self._end):
            context = tuple(self._text[end - self._size + 1 : end])
            self._continuations.setdefault(context, set()).add(self._text[end])

    def continuations(self, prefix: tuple[int, ...]) -> Collection[int]:
        """Return the tokens that have followed these n − 1 tokens."""
        self.update(len(self._text))
        return self._continuations.get(prefix, ())
