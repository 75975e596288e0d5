"""An answer's text as its tokens come in, and the rules on text that end it. Knows nothing of steps or drafts."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from decoding.sampling.detokenizer import Detokenizer
from decoding.sampling.params import SamplingParams
from decoding.sampling.stopping import FinishReason, StopStrings

# Ends an answer, given its tokens and text so far: the user's own rule, like transformers' `StoppingCriteria`.
Criterion = Callable[[Sequence[int], str], bool]


class Piece(NamedTuple):
    """What some tokens add to the answer."""

    text: str
    used: int  # how many of the tokens belong to it
    finish: FinishReason | None
    stop_reason: str | int | None  # the stop string, end token, or name of the rule that ended it


class TextStream:
    """The text of one request."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        params: SamplingParams,
        criteria: Sequence[Criterion] = (),
    ) -> None:
        """decode: ids to text."""
        self._params, self._hidden = params, params.hidden_token_ids
        self._criteria = criteria
        self._detokenizer = Detokenizer(decode, prompt=prompt)
        self._stop_strings = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._tokens: list[int] = []
        self._text = ""  # all of it, for the criteria; kept only if there are any

    def add(self, tokens: Sequence[int], finish: FinishReason | None) -> Piece:
        """What the next tokens add. finish: why the answer ends after them, if it does."""
        text, used = "", 0
        for part in self._parts(tokens):
            used += len(part)
            self._tokens.extend(part)
            shown, stop_reason = self._read(part)
            text += shown
            stop_reason = stop_reason or self._criterion(shown)
            if stop_reason is not None:
                return Piece(text, used, "stop", stop_reason)
        if finish is None:
            return Piece(text, len(tokens), None, None)
        shown, stop_reason = self._stop_strings.add(self._detokenizer.flush())
        text += shown
        if stop_reason is not None:
            return Piece(text, len(tokens), "stop", stop_reason)
        stop_token = tokens[-1] if finish == "stop" and tokens[-1] in self._params.stop_token_ids else None
        return Piece(text + self._stop_strings.flush(), len(tokens), finish, stop_token)

    def flush(self) -> str:
        """The text that was held back, of an answer that ends where it is."""
        shown, _ = self._stop_strings.add(self._detokenizer.flush())
        return shown + self._stop_strings.flush()

    def _parts(self, tokens: Sequence[int]) -> Iterable[Sequence[int]]:
        """Tokens to be read at once: all of them, unless the text may end at any."""
        by_token = self._params.stop or self._criteria
        return ([token] for token in tokens) if by_token else [tokens]

    def _read(self, tokens: Sequence[int]) -> tuple[str, str | None]:
        """The text that tokens make certain, and the stop string that they complete."""
        visible = [token for token in tokens if token not in self._hidden]  # those end the text and are not part of it
        if not visible:
            return "", None
        text = self._detokenizer.add(visible)
        if len(self._tokens) < self._params.min_tokens:  # as vLLM has it, stop strings count only from then on
            return text, None
        return self._stop_strings.add(text)

    def _criterion(self, shown: str) -> str | None:
        """The name of the user's rule that ends the answer here, if one does."""
        if not self._criteria:
            return None
        self._text += shown
        return next((_name(rule) for rule in self._criteria if rule(self._tokens, self._text)), None)


def _name(rule: Criterion) -> str:
    return getattr(rule, "__name__", type(rule).__name__)
