"""Shortens texts by a small model's probabilities, or prompts by its attention.

SpecPrefill (Liu et al., arXiv 2502.02789, section 3): the small model reads the prompt and writes a few tokens ahead;
chunks that get most of their attention stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import isfinite
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from decoding.errors import InvalidRequestError
from decoding.prompt_positions import PromptPositions
from deployments.endpoints.selection import (
    Piece,
    Stretch,
    force_last,
    keep_chunks,
    keep_perplexity,
    keep_sentences,
    split,
)
from deployments.fields.prompts import ShortenedPrompt

_KEEP = {"perplexity": keep_perplexity, "sentence": keep_sentences}
_MOST_TOKENS = 131_072  # of all texts of a request
_MOST_CHARACTERS = 8 * _MOST_TOKENS
_WINDOW = 2048  # tokens that are scored in one pass
_OVERLAP = 256  # of these, tokens before those that are scored
_UNKNOWN_LOGPROB = -16.0  # nats, of tokens that a trimmed vocabulary lacks, which have −∞
LOOK_AHEAD = 8  # tokens that the small model writes
_METHOD = "prompt_compression.method"


@dataclass(frozen=True, slots=True)
class CompressionOptions:
    """How to shorten texts. Either a rate or a budget."""

    method: str  # perplexity, sentence or attention
    rate: float | None = None  # share of the tokens to keep
    budget: int | None = None  # tokens to keep
    question: str = ""  # text that is relevant to it stays; empty: none
    keep_last: int = 0  # tokens at the end that stay
    force_tokens: frozenset[str] = frozenset()


class Compression:
    """One compression. Score `passes` by the model, then ask for the `result`."""

    def __init__(
        self, texts: Sequence[str], options: CompressionOptions, tokenizer: PreTrainedTokenizerBase, window: int
    ) -> None:
        """window: tokens that the model can read at once. Raises InvalidRequestError if the texts are too long."""
        if sum(map(len, texts)) > _MOST_CHARACTERS:
            raise _wrong("prompt_compression", f"at most {_MOST_CHARACTERS} characters can be compressed at once")
        self._options, self._tokenizer, self._window = options, tokenizer, min(_WINDOW, window)
        self._texts = split(texts, tokenizer, options.force_tokens)
        self._pieces = force_last(list(chain.from_iterable(self._texts)), options.keep_last)
        self._tokens = [token for piece in self._pieces for token in piece.tokens]
        count = len(self._tokens)
        self._budget = round((options.rate or 0) * count) if options.budget is None else options.budget
        self.passes: list[list[int]] = []  # token ids of texts whose log-probabilities decide
        self._scored: list[int] = []  # of each pass, how many of its last tokens count
        if self._budget >= count:
            return
        if count > _MOST_TOKENS:
            raise _wrong("prompt_compression", f"at most {_MOST_TOKENS} tokens can be compressed, not {count}")
        for question in dict.fromkeys(("", options.question)):
            self._add_passes(question)

    def result(self, logprobs: Sequence[Sequence[float]]) -> list[str]:
        """Return the texts, shortened; what stays is in its order, character by character.

        logprobs: for each of the passes, those of all tokens but the first, in nats.
        """
        if not self.passes:
            return ["".join(piece.text for piece in text) for text in self._texts]
        scores = self._scores(logprobs)
        kept = iter(_KEEP[self._options.method](self._pieces, scores, max(0, self._budget)))
        return ["".join([piece.text for piece in text if next(kept)]) for text in self._texts]

    def _add_passes(self, question: str) -> None:
        """Read all tokens after the question, window by window."""
        text = f"{question}\n\n" if question else "\n"
        prefix = self._tokenizer(text, add_special_tokens=True, verbose=False).input_ids
        step = self._window - len(prefix) - _OVERLAP
        if step < 1:
            raise _wrong("question", f"the model that compresses can read {self._window - _OVERLAP} tokens of it")
        for start in range(0, len(self._tokens), step):
            self.passes.append([*prefix, *self._tokens[max(0, start - _OVERLAP) : start + step]])
            self._scored.append(min(step, len(self._tokens) - start))

    def _scores(self, logprobs: Sequence[Sequence[float]]) -> list[float]:
        """Return each piece's score: its surprise, or how much the question lowers it, in nats per token."""
        scored = chain.from_iterable(line[-count:] for line, count in zip(logprobs, self._scored, strict=True))
        in_order = [logprob if isfinite(logprob) else _UNKNOWN_LOGPROB for logprob in scored]
        plain, given = in_order[: len(self._tokens)], in_order[len(self._tokens) :]
        if given:
            by_token = iter([after - before for before, after in zip(plain, given, strict=True)])
        else:
            by_token = iter([-logprob for logprob in plain])
        return [fmean([next(by_token) for _ in piece.tokens]) for piece in self._pieces]


@dataclass(frozen=True, slots=True)
class Compressor:
    """A model that compresses."""

    model: str  # its name in the configuration
    tokenizer: PreTrainedTokenizerBase
    context_length: int  # tokens
    has_target_tokens: bool = False  # whether its token ids are the target's, so that it can choose among them

    @property
    def window(self) -> int:
        """Tokens that it can read at once."""
        return self.context_length - 1

    def begin(self, texts: Sequence[str], options: CompressionOptions) -> Compression:
        """Begin a compression; raises InvalidRequestError if the texts, or the question, are too long."""
        return Compression(texts, options, self.tokenizer, self.window)


def _wrong(field: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {reason}.", field=field)


class ChunkCompression:
    """One compression. Let the model attend to each of `passes`, then ask for the `result`."""

    def __init__(
        self,
        tokens: Sequence[int],
        parts: Sequence[Stretch],
        options: CompressionOptions,
        tokenizer: PreTrainedTokenizerBase,
        window: int,
    ) -> None:
        """
        options: its budget is of the whole prompt.
        tokens: the whole prompt, special tokens before the text included.
        parts: the prompt's text, and what of it may not be shortened.
        window: tokens that the model can read at once.

        Raises InvalidRequestError if the prompt is too long, its tokens are not those of its text, or the budget too
        small.
        """
        (pieces,) = split(["".join(part.text for part in parts)], tokenizer, options.force_tokens)
        self._before = len(tokens) - sum(len(piece.tokens) for piece in pieces)
        if list(tokens[self._before :]) != [token for piece in pieces for token in piece.tokens]:
            raise _wrong(_METHOD, "the compressor has other tokens for this prompt; use sentence or perplexity")
        self.tokens, self._free = list(tokens), _are_free(pieces, parts)
        free = force_last([piece for piece, free in zip(pieces, self._free, strict=True) if free], options.keep_last)
        forced = iter(free)
        self._pieces = [next(forced) if free else piece for piece, free in zip(pieces, self._free, strict=True)]
        count = sum(len(piece.tokens) for piece in free)
        fixed = len(tokens) - count
        if options.budget is not None and options.budget <= fixed:
            reason = f"should be above {fixed}, the tokens that may not be shortened, not {options.budget}"
            raise InvalidRequestError(f"target_tokens: {reason}.", field="prompt_compression.target_tokens")
        self._budget = round((options.rate or 0) * count) if options.budget is None else options.budget - fixed
        self.passes = [] if self._budget >= count else [self.tokens]
        if self.passes and len(tokens) + LOOK_AHEAD > window:
            reason = f"attention reads the whole prompt, {len(tokens)} tokens, but the compressor can read"
            raise _wrong(_METHOD, f"{reason} {window - LOOK_AHEAD}; use sentence or perplexity")

    def result(self, attention: Sequence[Sequence[float]]) -> ShortenedPrompt:
        """Return the prompt, shortened.

        attention: for each of the passes, how much the model attends to each of its tokens.
        """
        if not self.passes:
            return ShortenedPrompt(self.tokens, None, "".join(piece.text for piece in self._pieces))
        ends = list(accumulate((len(piece.tokens) for piece in self._pieces), initial=self._before))
        scores = [fmean(attention[0][start:end]) for start, end in pairwise(ends)]
        kept = keep_chunks(self._pieces, scores, self._free, max(0, self._budget))
        positions = list(range(self._before))
        for keep, start, end in zip(kept, ends, ends[1:], strict=False):
            positions += range(start, end) if keep else ()
        text = "".join(piece.text for piece, keep in zip(self._pieces, kept, strict=True) if keep)
        tokens = [self.tokens[position] for position in positions]
        return ShortenedPrompt(tokens, PromptPositions(positions, len(self.tokens)), text)


def _are_free(pieces: Sequence[Piece], parts: Sequence[Stretch]) -> list[bool]:
    """Return whether each piece may be removed: whether it is all in such parts."""
    free = [not part.protected for part in parts for _ in part.text]
    ends = list(accumulate((len(piece.text) for piece in pieces), initial=0))
    return [start < end and all(free[start:end]) for start, end in pairwise(ends)]
