"""An answer as its deltas come in: each is a part, and all parts together are the whole. Knows no JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.coordinator.request import Delta, Request, Statistics, TokenSource
from actors.wire.messages import MemberView
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams
from decoding.sampling.stopping import FinishReason
from deployments.answers.echoed_prompt import Echo, begins
from deployments.tokenizers.token_decoder import Vocabulary


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer, an echoed prompt, or several joined. What nobody asked for is empty."""

    text: str = ""
    tokens: Sequence[int] = ()
    pieces: Sequence[str] = ()  # what each token adds to the text; a character comes with its last token
    offsets: Sequence[int] = ()  # where in the text each token begins, in characters
    sources: Sequence[TokenSource] = ()
    views: Sequence[Sequence[MemberView]] = ()  # of each token, what an ensemble's members thought of it
    logprobs: Sequence[TokenLogprobs | None] = ()  # of each token; None: there is nothing before it
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # from the prompt's second token on
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None  # of an answer that was searched for

    @staticmethod
    def joined(parts: "Sequence[Part]") -> "Part":
        """All of them as one, which ends as the last one does."""
        last = parts[-1] if parts else Part()
        told = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
        return Part(
            "".join(part.text for part in parts),
            [token for part in parts for token in part.tokens],
            [piece for part in parts for piece in part.pieces],
            [offset for part in parts for offset in part.offsets],
            [source for part in parts for source in part.sources],
            [view for part in parts for view in part.views],
            [logprob for part in parts for logprob in part.logprobs],
            told[-1] if told else None,
            last.finish,
            last.stop_reason,
            last.score,
        )


class Choice:
    """One answer."""

    def __init__(
        self, request: Request, vocabulary: Vocabulary, *, by_token: bool, echo: Echo | None = None, prompt_only: bool
    ) -> None:
        """
        by_token: whether texts and offsets of single tokens are wanted.
        echo: of the prompt, which begins the answer; None: it does not.
        prompt_only: leave out what the model answers.
        """
        self._params = request.params
        self._splitter = _Splitter(vocabulary, request.prompt, request.params) if by_token else None
        self._echo, self._prompt_only = echo, prompt_only
        self._length = 0  # of the text, as far as tokens made it
        self._parts: list[Part] = []
        self._logprobs: list[float] = []
        self.statistics = Statistics()

    @property
    def finish(self) -> FinishReason | None:
        return self._parts[-1].finish if self._parts else None

    @property
    def mean_logprob(self) -> float:
        """Per token of the answer; of an answer without tokens, minus infinity."""
        return sum(self._logprobs) / len(self._logprobs) if self._logprobs else float("-inf")

    def add(self, delta: Delta) -> tuple[Part, bool]:
        """The part that a delta adds, and whether it is the first."""
        if self._prompt_only:
            delta = _without_answer(delta)
        first = not self._parts
        part = self._part(delta)
        if first and self._echo is not None:
            part = Part.joined([self._echoed(self._echo, delta), part])
        self._parts.append(part)
        self._logprobs += [one.logprob for one in delta.logprobs or ()]
        self.statistics = delta.statistics
        return part, first

    def whole(self) -> Part:
        """All parts so far."""
        return Part.joined(self._parts)

    def _part(self, delta: Delta) -> Part:
        pieces = self._splitter.split(delta) if self._splitter is not None else []
        return Part(
            delta.text,
            delta.tokens,
            pieces,
            self._offsets(pieces),
            delta.sources,
            delta.views or (),
            delta.logprobs or (),
            delta.prompt_logprobs,
            delta.finish,
            delta.stop_reason,
            delta.score,
        )

    def _echoed(self, echo: Echo, first: Delta) -> Part:
        logprobs = () if first.prompt_logprobs is None else (None, *first.prompt_logprobs)
        if self._splitter is None:
            return Part(echo.text, echo.tokens, logprobs=logprobs)
        return Part(echo.text, echo.tokens, echo.pieces, echo.offsets, logprobs=logprobs)

    def _offsets(self, pieces: Sequence[str]) -> list[int]:
        offset = self._length + (0 if self._echo is None else len(self._echo.text))
        self._length += sum(map(len, pieces))
        return [offset + begin for begin in begins(pieces)]


class _Splitter:
    """Tells what each of an answer's tokens adds to its text."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = vocabulary.pieces(prompt)
        self._hidden = params.hidden_token_ids

    def split(self, delta: Delta) -> list[str]:
        pieces = ["" if token in self._hidden else self._detokenizer.add([token]) for token in delta.tokens]
        if delta.finish is not None and pieces:
            pieces[-1] += self._detokenizer.flush()
        return pieces


def _without_answer(delta: Delta) -> Delta:
    statistics = replace(delta.statistics, committed=0)
    return replace(
        delta, text="", tokens=(), sources=(), views=(), logprobs=(), statistics=statistics, stop_reason=None
    )
