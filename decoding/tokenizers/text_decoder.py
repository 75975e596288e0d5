"""Function from token ids to text that also says what of a text may change when tokens follow. Knows no tokenizer."""

from collections.abc import Callable, Container
from dataclasses import dataclass

EVERY_TOKEN = range(2**63)  # `unsettled` of a decoder of which nothing is known before the text ends


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
