"""Incremental detokenisation: token ids in, complete characters out. Knows the tokenizer as one function."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character
_MIN_CONTEXT = 5  # tokens
_LONGEST_WINDOW = 96  # tokens; a longer window has not ended a character for long, and is shortened
_HEAD, _TAIL = 32, 16  # tokens kept of a window that is shortened
_CONTEXT_TOKENS = range(_MIN_CONTEXT, 17)  # of the prompt; the fewest that start a character


class Detokenizer:
    """Turns a growing list of tokens into text deltas, which concatenate to the decoded text of all tokens.

    Decodes only the latest tokens with some context before them, because decoders treat the start of a text
    differently (leading spaces).
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        """decode: ids to text. prompt: tokens before the answer, which are never emitted."""
        self._decode = decode
        self._window = _context(decode, prompt)
        self._shown = decode(self._window)  # the certain part of the window's text
        self._cut = len(self._window)  # index at which a character begins, so the window may

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the new text, without an incomplete character at its end.

        Bytes that are no text may be decoded otherwise once more follow, so tokens are taken one by one.
        """
        return "".join([self._add(token) for token in tokens])

    def _add(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_INCOMPLETE)
        new = certain[len(self._shown) :]
        if new:
            self._shown = certain
            if len(certain) == len(text) and len(self._window) - self._cut >= _MIN_CONTEXT:
                self._window = self._window[self._cut :]
                self._shown = self._decode(self._window)
                self._cut = len(self._window)
        return new + self._shorten(text) if len(self._window) > _LONGEST_WINDOW else new

    def _shorten(self, text: str) -> str:
        """Drop the middle of a long window in which no character ends: special tokens, or bytes that are no text.

        The text that follows depends only on the last bytes, and on whether the text has begun.
        Returns U+FFFD for the dropped bytes, which can no longer become characters. text: the window decoded.
        """
        kept = self._window[:_HEAD] + self._window[-_TAIL:]
        shown = self._decode(kept)
        certain = shown.rstrip(_INCOMPLETE)
        unshown = len(text) - max(len(self._shown), len(text.rstrip(_INCOMPLETE)))
        decided = unshown - (len(shown) - len(certain))
        if decided < 0:
            return ""
        self._window, self._shown = kept, certain
        self._cut = self._cut if self._cut <= _HEAD else 0
        return _INCOMPLETE * decided

    def flush(self) -> str:
        """Return the remaining text, with incomplete characters as the decoder prints them."""
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
