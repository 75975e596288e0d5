"""Incremental detokenisation: token ids in, text that can no longer change out."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

EVERY_TOKEN = range(2**63)  # `unsettled` of a decoder of which nothing is known before the text ends
_INCOMPLETE = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character
_MIN_CONTEXT = 5  # tokens
_LONGEST_WINDOW = 96  # tokens; a longer window has not ended a character for long, and is shortened
_HEAD, _TAIL = 32, 16  # tokens kept of a window that is shortened
_CONTEXT_TOKENS = (*range(_MIN_CONTEXT, 17), 32, 64)  # of the prompt; the fewest that start a character


@dataclass(frozen=True, slots=True, eq=False)
class TextDecoder:
    """Decodes tokens, then replaces strings in the whole text."""

    decode: Callable[[list[int]], str]  # without the replacements; may change U+FFFD at the end, but not what is before
    unsettled: Container[int] = ()  # tokens that may change the text of those before them, up to the first other token
    replacements: tuple[tuple[str, str], ...] = ()  # (old, new), each in the text that those before it leave

    def __call__(self, tokens: list[int]) -> str:
        """Return the text of the tokens."""
        text = self.decode(tokens)
        for old, new in self.replacements:
            text = text.replace(old, new)
        return text


class StreamedReplacements:
    """`str.replace` one after the other on streamed text. Holds back what may begin a string to be replaced."""

    def __init__(self, replacements: tuple[tuple[str, str], ...]) -> None:
        """replacements: (old, new)."""
        self._replacements = replacements
        self._held = [""] * len(replacements)

    def add(self, text: str) -> str:
        """Add text. Returns what can no longer change."""
        for index, (old, new) in enumerate(self._replacements):
            *before, last = (self._held[index] + text).split(old)
            keep = next(length for length in range(len(old) - 1, -1, -1) if last.endswith(old[:length]))
            self._held[index] = last[len(last) - keep :]
            text = new.join([*before, last[: len(last) - keep]])
        return text

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        text = ""
        for (old, new), held in zip(self._replacements, self._held, strict=True):
            text = (held + text).replace(old, new)
        self._held = [""] * len(self._held)
        return text


class Detokenizer:
    """Turns a growing list of tokens into text deltas, which concatenate to the decoded text of all tokens.

    Decodes only the latest tokens with some context before them, because decoders treat the start of a text
    differently (leading spaces).
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        """decode: ids to text. prompt: tokens before the answer, whose text is not emitted."""
        decoder = decode if isinstance(decode, TextDecoder) else TextDecoder(decode)
        self._decode, self._unsettled = decoder.decode, decoder.unsettled
        self._window = _context(decoder.decode, prompt)
        text = decoder.decode(self._window)
        self._shown = text.rstrip(_INCOMPLETE)  # the certain part of the window's text
        self._cut = len(self._window)  # index at which a character begins, so the window may
        self._replacements = StreamedReplacements(decoder.replacements)
        settled = self._replacements.add(self._shown)
        self._prompt = decoder(self._window)[len(settled) :]  # its end, which the answer may change

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the new text that no further token can change.

        Bytes that are no text may be decoded otherwise once more follow, so tokens are taken one by one.
        """
        return self._after_prompt(self._replacements.add("".join([self._add(token) for token in tokens])))

    def _add(self, token: int) -> str:
        self._window.append(token)
        if token in self._unsettled:
            return ""
        text = self._decode(self._window)
        certain = text.rstrip(_INCOMPLETE)
        new = certain[len(self._shown) :]
        if new:
            self._shown = certain
            if len(certain) == len(text) and len(self._window) - self._cut >= _MIN_CONTEXT:
                self._move_window()
        return new + self._shorten(text) if len(self._window) > _LONGEST_WINDOW else new

    def _move_window(self) -> None:
        """Drop the window's tokens before the cut, unless the others would be the empty start of a text."""
        window = self._window[self._cut :]
        if shown := self._decode(window):
            self._window, self._shown = window, shown
        self._cut = len(self._window)

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

    def _after_prompt(self, text: str) -> str:
        """Return the text without what it repeats of the prompt's end, of which spaces may have been removed."""
        while self._prompt and text:
            is_repeated, is_removed = self._prompt[0] == text[0], self._prompt[0] == " "
            text = text[is_repeated:]
            self._prompt = self._prompt[1:] if is_repeated or is_removed else ""
        return text

    def flush(self) -> str:
        """Return the remaining text, with incomplete characters as the decoder prints them."""
        rest = self._replacements.add(self._decode(self._window)[len(self._shown) :]) + self._replacements.flush()
        self._window, self._shown, self._cut = [], "", 0
        return self._after_prompt(rest)


def _context(decode: Callable[[list[int]], str], prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of the prompt, enough to start a character and to have a text."""
    for length in _CONTEXT_TOKENS:
        context = list(prompt[-length:])
        text = decode(context)
        if length >= len(prompt) or (text and not text.startswith(_INCOMPLETE)):
            break
    return context
