"""Incremental detokenisation: token ids in, text out, never half a character. Knows the tokenizer as one function."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character
_CONTEXT_TOKENS = range(5, 17)  # of the prompt: as few as begin with a whole character


class Detokenizer:
    """Turns a growing list of tokens into text deltas whose concatenation is the decoded text of all tokens.

    Decodes only a short window: the tokens since the last clean boundary, with a little context before them, because
    decoders treat the beginning of a text differently (leading spaces).
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        """decode: ids to text; prompt: the tokens before, which are never emitted."""
        self._decode = decode
        self._window = _context(decode, prompt)  # context tokens, then tokens not yet emitted
        self._context_length = len(self._window)
        self._context_text = decode(self._window)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these tokens; empty while a character is incomplete."""
        self._window.extend(tokens)
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE) or len(text) <= len(self._context_text):
            return ""
        shown = text[len(self._context_text) :]
        self._window = self._window[self._context_length :]
        self._context_length = len(self._window)
        self._context_text = self._decode(self._window)
        return shown

    def flush(self) -> str:
        """What is left at the end, incomplete characters included, as the decoder prints them."""
        shown = self._decode(self._window)[len(self._context_text) :]
        self._window, self._context_length, self._context_text = [], 0, ""
        return shown


def _context(decode: Callable[[list[int]], str], prompt: Sequence[int]) -> list[int]:
    """The last tokens of the prompt, cut where a character begins; none if the prompt ends within a character."""
    for length in _CONTEXT_TOKENS:
        context = list(prompt[-length:])
        text = decode(context)
        if text.endswith(_INCOMPLETE):
            return []
        if not text.startswith(_INCOMPLETE) or length >= len(prompt):
            return context
    return []
