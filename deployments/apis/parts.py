"""Parts of an answer, one per delta, which joined are the whole answer. The first may be an echoed prompt."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from actors.coordinator.request import Delta, Request, Statistics
from actors.wire.messages import MemberView, TokenSource
from decoding.drafts.draft import ProposerName
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import TokenLogprobs
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
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += len(piece)
    return offsets


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer, an echoed prompt, or several joined. Fields that were not requested are empty."""

    text: str = ""
    tokens: Sequence[int] = ()
    pieces: Sequence[str] = ()  # text that each token adds; a character comes with its last token
    offsets: Sequence[int] = ()  # index of the character at which each token begins
    sources: Sequence[TokenSource] = ()
    proposers: Sequence[ProposerName | None] = ()  # who drafted each token, if it was accepted
    views: Sequence[Sequence[MemberView]] = ()  # for each token, the view of each member of an ensemble
    logprobs: Sequence[TokenLogprobs | None] = ()  # for each token; None: the first of a prompt
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # from the prompt's second token on
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None  # of beam search

    @staticmethod
    def joined(parts: "Sequence[Part]") -> "Part":
        """Join parts into one that ends as the last does."""
        last = parts[-1] if parts else Part()
        prompt_logprobs = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
        return Part(
            "".join(part.text for part in parts),
            [token for part in parts for token in part.tokens],
            [piece for part in parts for piece in part.pieces],
            [offset for part in parts for offset in part.offsets],
            [source for part in parts for source in part.sources],
            [proposer for part in parts for proposer in part.proposers],
            [view for part in parts for view in part.views],
            [logprob for part in parts for logprob in part.logprobs],
            prompt_logprobs[-1] if prompt_logprobs else None,
            last.finish,
            last.stop_reason,
            last.score,
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
        self._params = request.params
        self._splitter = _Splitter(decoder, request.prompt, request.params) if by_token else None
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
            delta = _without_answer(delta)
        first = not self._parts
        part = self._part(delta)
        if first and self._echo is not None:
            part = Part.joined([self._echoed(self._echo, delta), part])
        self._parts.append(part)
        self._logprobs += [token.logprob for token in delta.logprobs or ()]
        self.statistics = delta.statistics
        return part, first

    def whole(self) -> Part:
        return Part.joined(self._parts)

    def _part(self, delta: Delta) -> Part:
        pieces = self._splitter.split(delta) if self._splitter is not None else []
        return Part(
            delta.text,
            delta.tokens,
            pieces,
            self._offsets(pieces),
            delta.sources,
            delta.proposers,
            delta.views or (),
            delta.logprobs or (),
            delta.prompt_logprobs,
            delta.finish,
            delta.stop_reason,
            delta.score,
        )

    def _echoed(self, echo: EchoedPrompt, first: Delta) -> Part:
        logprobs = () if first.prompt_logprobs is None else (None, *first.prompt_logprobs)
        if self._splitter is None:
            return Part(echo.text, echo.tokens, logprobs=logprobs)
        return Part(echo.text, echo.tokens, echo.pieces, echo.offsets, logprobs=logprobs)

    def _offsets(self, pieces: Sequence[str]) -> list[int]:
        offset = self._length + (0 if self._echo is None else len(self._echo.text))
        self._length += sum(map(len, pieces))
        return [offset + begin for begin in piece_offsets(pieces)]


class _Splitter:
    """Splits an answer's text into the pieces that its tokens add."""

    def __init__(self, decoder: TokenDecoder, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = decoder.detokenizer(prompt)
        self._hidden = params.hidden_token_ids

    def split(self, delta: Delta) -> list[str]:
        pieces = ["" if token in self._hidden else self._detokenizer.add([token]) for token in delta.tokens]
        if delta.finish is not None and pieces:
            pieces[-1] += self._detokenizer.flush()
        return pieces


def _without_answer(delta: Delta) -> Delta:
    statistics = replace(delta.statistics, committed=0)
    return replace(
        delta,
        text="",
        tokens=(),
        sources=(),
        proposers=(),
        views=(),
        logprobs=(),
        statistics=statistics,
        stop_reason=None,
    )
