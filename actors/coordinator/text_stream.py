"""Turns an answer's tokens into text and ends it at stop strings and criteria. Knows nothing of steps or drafts."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from decoding.sampling.params import SamplingParams
from decoding.sampling.stopping import FinishReason, StopStrings
from decoding.tokenizers.detokenizer import Detokenizer

# Whether an answer should end, given its tokens and text so far. Like transformers' `StoppingCriteria`.
Criterion = Callable[[Sequence[int], str], bool]


class Piece(NamedTuple):
    """Text that some tokens add to an answer."""

    text: str
    used: int  # number of the tokens that belong to the answer
    finish: FinishReason | None
    stop_reason: str | int | None  # the stop string, stop token or criterion that ended it


class TextStream:
    """Incremental text of one answer."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        params: SamplingParams,
        criteria: Sequence[Criterion] = (),
    ) -> None:
        """decode: token ids to text. prompt: its end affects how the first tokens are decoded."""
        self._params, self._hidden = params, params.hidden_token_ids
        self._criteria = criteria
        self._detokenizer = Detokenizer(decode, prompt=prompt)
        self._stop_strings = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._tokens: list[int] = []
        self._text = ""  # the whole text, kept only for criteria

    def add(self, tokens: Sequence[int], finish: FinishReason | None) -> Piece:
        """Add the next tokens. finish: why the answer ends after them, if it does."""
        text, used = "", 0
        for chunk in self._chunks(tokens):
            used += len(chunk)
            self._tokens.extend(chunk)
            added, stop_reason = self._decode(chunk)
            text += added
            stop_reason = stop_reason or self._check_criteria(added)
            if stop_reason is not None:
                return Piece(text, used, "stop", stop_reason)
        if finish is None:
            return Piece(text, len(tokens), None, None)
        rest, stop_reason = self._stop_strings.add(self._detokenizer.flush(), may_end=self._has_min_tokens)
        text += rest
        if stop_reason is not None:
            return Piece(text, len(tokens), "stop", stop_reason)
        stop_token = tokens[-1] if finish == "stop" and tokens[-1] in self._params.stop_token_ids else None
        return Piece(text + self._stop_strings.flush(), len(tokens), finish, stop_token)

    def flush(self) -> str:
        """Return the text held back, when the answer ends."""
        text, _ = self._stop_strings.add(self._detokenizer.flush())
        return text + self._stop_strings.flush()

    def _chunks(self, tokens: Sequence[int]) -> Iterable[Sequence[int]]:
        """Split tokens into single ones if the answer may end at any of them."""
        by_token = self._params.stop or self._criteria
        return ([token] for token in tokens) if by_token else [tokens]

    def _decode(self, tokens: Sequence[int]) -> tuple[str, str | None]:
        """Return the text that is now certain, and the stop string that it completes, if any."""
        visible = [token for token in tokens if token not in self._hidden]  # stop tokens are not part of the text
        if not visible:
            return "", None
        # A stop string counts if it ends after min_tokens, as in vLLM.
        return self._stop_strings.add(self._detokenizer.add(visible), may_end=self._has_min_tokens)

    @property
    def _has_min_tokens(self) -> bool:
        return len(self._tokens) >= self._params.min_tokens

    def _check_criteria(self, text: str) -> str | None:
        """Return the name of the criterion that ends the answer here, if any."""
        if not self._criteria:
            return None
        self._text += text
        matches = (criterion for criterion in self._criteria if criterion(self._tokens, self._text))
        return next(map(_name, matches), None)


def _name(criterion: Criterion) -> str:
    return getattr(criterion, "__name__", type(criterion).__name__)
