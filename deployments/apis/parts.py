"""Parts of an answer, one per delta, which joined are the whole answer. The first may be an echoed prompt."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import msgspec

from actors.coordinator.request import Delta, Request, Statistics
from actors.wire.messages import Token
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.stopping import FinishReason
from deployments.apis.decoder import TokenDecoder


class EchoedPrompt:
    """The text and tokens of one prompt, and the text of each token, made when first needed."""

    def __init__(self, text: str, tokens: Sequence[int], decoder: TokenDecoder) -> None:
        self.text, self.tokens, self._decoder = text, tokens, decoder

    @cached_property
    def pieces(self) -> list[str]:
        splitter = self._decoder.detokenizer(())
        pieces = [splitter.add([token]) for token in self.tokens]
        return [*pieces[:-1], pieces[-1] + splitter.flush()] if pieces else []

    @cached_property
    def offsets(self) -> list[int]:
        """Index of the character at which each token begins."""
        return piece_offsets(self.pieces)


def piece_offsets(pieces: Sequence[str]) -> list[int]:
    """Index of the character at which each piece begins in the joined text."""
    return list(accumulate(map(len, pieces), initial=0))[: len(pieces)]


class TextToken(msgspec.Struct, frozen=True, gc=False):
    """A token and the text that it adds, if that was requested. A character comes with its last token."""

    token: Token
    text: str = ""
    offset: int = 0  # index of the character at which it begins


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer, or several joined."""

    text: str = ""
    tokens: Sequence[TextToken] = ()
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # from the prompt's second token on
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None  # of beam search
    echoed: Sequence[TextToken] = ()  # of the prompt, whose text comes first

    @property
    def token_ids(self) -> list[int]:
        return [each.token.id for each in self.tokens]

    @staticmethod
    def joined(parts: "Sequence[Part]") -> "Part":
        """Join parts into one that ends as the last does."""
        last = parts[-1] if parts else Part()
        prompt_logprobs = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
        return replace(
            last,
            text="".join(part.text for part in parts),
            tokens=[token for part in parts for token in part.tokens],
            prompt_logprobs=prompt_logprobs[-1] if prompt_logprobs else None,
            echoed=[token for part in parts for token in part.echoed],
        )


def reasoning_tokens(reasoning: str, tokens: Sequence[int], decoder: TokenDecoder) -> int:
    """Count the tokens of an answer up to the end of its reasoning, the tag that opens it included; 0 without any."""
    if not reasoning:
        return 0
    begin = max(decoder.decode_with_special(list(tokens)).find(reasoning), 0)
    end = begin + len(reasoning)
    lengths = range(1, len(tokens) + 1)
    reach = bisect_left(lengths, end, key=lambda length: len(decoder.decode_with_special(list(tokens[:length]))))
    return min(reach + 1, len(tokens))


class Choice:
    """One answer, which grows with its deltas."""

    def __init__(
        self,
        request: Request,
        decoder: TokenDecoder,
        *,
        by_token: bool,
        echo: EchoedPrompt | None = None,
        prompt_only: bool,
    ) -> None:
        """
        by_token: whether to split the text into pieces with offsets.
        echo: prompt that begins the answer; None: no echo.
        prompt_only: leave out the model's answer.
        """
        self._detokenizer = decoder.detokenizer(request.prompt) if by_token else None
        self._hidden = request.params.hidden_token_ids if by_token else frozenset[int]()
        self._echo, self._prompt_only = echo, prompt_only
        self._length = 0  # characters of all pieces so far
        self._parts: list[Part] = []
        self._logprobs: list[float] = []
        self.statistics = Statistics()

    @property
    def finish(self) -> FinishReason | None:
        return self._parts[-1].finish if self._parts else None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the answer's tokens; −∞ without tokens."""
        return sum(self._logprobs) / len(self._logprobs) if self._logprobs else float("-inf")

    def add(self, delta: Delta) -> tuple[Part, bool]:
        """Add a delta; return its part, and whether it is the first."""
        if self._prompt_only:
            statistics = replace(delta.statistics, committed=0)
            delta = replace(delta, text="", tokens=(), statistics=statistics, stop_reason=None)
        first = not self._parts
        part = Part(
            delta.text, self._tokens(delta), delta.prompt_logprobs, delta.finish, delta.stop_reason, delta.score
        )
        if first and self._echo is not None:
            part = replace(part, text=self._echo.text + part.text, echoed=self._echoed(self._echo, delta))
        self._parts.append(part)
        self._logprobs += [logprobs.logprob for logprobs in delta.logprobs]
        self.statistics = delta.statistics
        return part, first

    def whole(self) -> Part:
        return Part.joined(self._parts)

    def _echoed(self, echo: EchoedPrompt, first: Delta) -> list[TextToken]:
        logprobs = (None, *first.prompt_logprobs) if first.prompt_logprobs else [None] * len(echo.tokens)
        tokens = [Token(token, logprobs=each) for token, each in zip(echo.tokens, logprobs, strict=True)]
        if self._detokenizer is None:
            return [*map(TextToken, tokens)]
        return [*map(TextToken, tokens, echo.pieces, echo.offsets)]

    def _tokens(self, delta: Delta) -> list[TextToken]:
        """Return the delta's tokens, by token with the pieces of text that they add."""
        if self._detokenizer is None:
            return [*map(TextToken, delta.tokens)]
        pieces = ["" if token in self._hidden else self._detokenizer.add([token]) for token in delta.token_ids]
        if delta.finish is not None and pieces:
            pieces[-1] += self._detokenizer.flush()
        begin = self._length + (0 if self._echo is None else len(self._echo.text))
        self._length += sum(map(len, pieces))
        return [*map(TextToken, delta.tokens, pieces, [begin + offset for offset in piece_offsets(pieces)])]
