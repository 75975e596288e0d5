"""Incremental detokenisation: token ids in, text out, never half a character. Knows the tokenizer as one function."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character


class Detokenizer:
    """Turns a growing list of tokens into text deltas whose concatenation is the decoded text of all tokens.

    Decodes only a short window: the tokens since the last clean boundary, with a little context before them, because
    decoders treat the beginning of a text differently (leading spaces).
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        """decode: ids to text; context: the last tokens of the prompt, which are never emitted."""
        self._decode = decode
        self._window = list(context)  # context tokens, then tokens not yet emitted
        self._emitted = len(self._window)  # how many of the window are context

    def add(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these tokens; empty while a character is incomplete."""
        self._window.extend(tokens)
        before, after = self._texts()
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left at the end, incomplete characters included, as the decoder prints them."""
        before, after = self._texts()
        self._emitted = len(self._window)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._window[: self._emitted]), self._decode(self._window)
