"""Incremental detokenisation: token ids in, complete characters out. Knows the tokenizer as one function."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what decoders print for an incomplete character
_MIN_CONTEXT = 5  # tokens
_CONTEXT_TOKENS = range(_MIN_CONTEXT, 17)  # of the prompt: the fewest that begin with a complete character


class Detokenizer:
    """Turns a growing list of tokens into text deltas, which concatenate to the decoded text of all tokens.

    Decodes only the latest tokens with some context before them, because decoders treat the start of a text
    differently (leading spaces).
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        """decode: ids to text; prompt: tokens before, which are never emitted."""
        self._decode = decode
        self._window = _context(decode, prompt)
        self._shown = decode(self._window)  # the certain part of the window's text
        self._cut = len(self._window)  # index at which a character begins, so the window may

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the new text, without an incomplete character at its end."""
        self._window.extend(tokens)
        text = self._decode(self._window)
        certain = text.rstrip(_INCOMPLETE)
        new = certain[len(self._shown) :]
        if new:
            self._shown = certain
            if len(certain) == len(text) and len(self._window) - self._cut >= _MIN_CONTEXT:
                self._window = self._window[self._cut :]
                self._shown = self._decode(self._window)
                self._cut = len(self._window)
        return new

    def flush(self) -> str:
        """Return the rest at the end of the text; incomplete characters as the decoder prints them."""
        rest = self._decode(self._window)[len(self._shown) :]
        self._window, self._shown, self._cut = [], "", 0
        return rest


def _context(decode: Callable[[list[int]], str], prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of the prompt from the start of a character; [] if it ends within a character."""
    for length in _CONTEXT_TOKENS:
        context = list(prompt[-length:])
        text = decode(context)
        if text.endswith(_INCOMPLETE):
            return []
        if not text.startswith(_INCOMPLETE) or length >= len(prompt):
            return context
    return []
