"""Texts across tokenizers: a target's tokens as a drafter or a member reads them, drafts as the target writes them.

Everything goes through the bytes of the text, as in Timor et al., arXiv 2502.05202 (string-level matching). Drafts are
hints, so a translation that the target would have made otherwise costs a draft and nothing else. Knows tokenizers
only as tables of tokens and one function each.
"""

import unicodedata
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

from decoding.vocabulary import Meaning, Vocabulary

_CONTEXTS = ("", "\ue000")  # what may stand before a text so that it is not written as a beginning: of private use, so
# that no token joins it with what follows
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a character that are not its first
_new_decoder = getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Translation:
    """A draft in the target's tokens. Those that are not certain are worth a try: they are right if the draft's last
    word is complete.
    """

    tokens: list[int]
    certain: int  # so many of them are the target's way to write the draft, whatever text comes after it


class Speller:
    """Writes text in the tokens of one tokenizer."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        """encode: text to ids, without the special tokens that begin or end a text."""
        self.vocabulary = vocabulary
        self.encode = encode
        self.adds_space = vocabulary.decode_bytes(encode("a")) == b" a"

    def strip(self, data: bytes) -> bytes:
        """What tokens at the beginning of a text stand for, less the space that the tokenizer puts there itself."""
        return data[1:] if self.adds_space and data.startswith(b" ") else data

    def encode_continuation(self, text: str) -> list[int] | None:
        """The tokens of a text that others come before; None if they would not spell it exactly."""
        data = text.encode()
        for context in _CONTEXTS:
            tokens = self._ending(self.encode(context + text), data)
            if tokens is not None:
                return tokens
        return None

    def encode_start(self, text: str) -> list[int] | None:
        """The tokens of a text that nothing comes before; None if they would not spell it exactly."""
        tokens = self.encode(text)
        return tokens if self.strip(self.vocabulary.decode_bytes(tokens)) == text.encode() else None

    def meaning(self, token: int, *, fresh: bool) -> Meaning | None:
        """What a token stands for; fresh: at the beginning of a text."""
        meaning = self.vocabulary.meanings[token]
        return self.strip(meaning) if fresh and isinstance(meaning, bytes) else meaning

    def first(self, meaning: Meaning, *, fresh: bool) -> int:
        """The first token with which it writes something, or as much of it as it can; −1 if it can't begin to."""
        ids = self.vocabulary.ids
        if isinstance(meaning, str):
            return ids.get(meaning, -1)
        space = b" " if fresh and self.adds_space else b""
        data = space + meaning
        if data in ids:
            return ids[data]
        text = _whole_characters(meaning)
        if text.encode() == meaning:
            written = self.encode_start(text) if fresh else self.encode_continuation(text)
            if spelling := [token for token in written or () if self.vocabulary.decode_bytes([token])]:
                return spelling[0]
        longest = (data[:length] for length in range(len(data) - 1, len(space), -1))
        return next((ids[part] for part in longest if part in ids), -1)

    def spell_bytes(self, data: bytes) -> list[int] | None:
        """A token per byte; None if one is missing."""
        tokens = [self.vocabulary.ids.get(bytes([byte]), -1) for byte in data]
        return None if -1 in tokens else tokens

    def _ending(self, tokens: list[int], data: bytes) -> list[int] | None:
        """The last tokens, if they spell exactly this."""
        at, length = len(tokens), 0
        while length < len(data) and at > 0:
            at -= 1
            length += len(self.vocabulary.decode_bytes(tokens[at : at + 1]))
        return tokens[at:] if self.vocabulary.decode_bytes(tokens[at:]) == data else None


class TextAligner:
    """A text that the target writes, in the drafter's tokens, and drafts of what follows, in the target's.

    Control tokens are translated by what they are for; one that the other tokenizer lacks is left out. The text between
    two of them is a segment of its own.
    """

    def __init__(self, target: Speller, drafter: Speller, prefix: Sequence[int] = ()) -> None:
        """prefix: the drafter's tokens before any text, for a drafter that needs a beginning which the target lacks."""
        self._target, self._drafter = target, drafter
        self.tokens = list(prefix)  # the committed text in the drafter's tokens, as far as its characters are whole
        self._fresh = True  # nothing of the segment is committed
        self._begin_segment(None)

    @classmethod
    def for_text(cls, target: Speller, drafter: Speller, tokens: Sequence[int], *, begins_texts: bool) -> "TextAligner":
        """Of a text that begins with these tokens of the target, which are yet to be committed.

        begins_texts: the drafter expects its "bos" token before a text, should the target have none there.
        """
        begin = drafter.vocabulary.ids.get("bos") if begins_texts else None
        begun = target.vocabulary.meanings[tokens[0]] == "bos"
        return cls(target, drafter, () if begun or begin is None else (begin,))

    def fork(self) -> "TextAligner":
        """The same text, to go on with in another way."""
        other = copy(self)
        other.tokens, other._text = self.tokens.copy(), self._text.copy()
        other._decoder = _new_decoder("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    @property
    def pending(self) -> bytes:
        """The committed bytes of a character that is not whole yet, which `tokens` lack."""
        return self._decoder.getstate()[0]

    @property
    def fresh(self) -> bool:
        """Whether nothing of the text is committed since its beginning, or since a control token."""
        return self._fresh

    def commit(self, tokens: Sequence[int]) -> int:
        """Append committed tokens of the target.

        Returns:
            How many of the drafter's tokens are what they were: the rest may have been written in another way, now that
            it is known how the text goes on. Costs as much as the last words are long, or, in a text without spaces,
            as the segment.
        """
        kept, text = len(self.tokens), ""
        for token in tokens:
            meaning = self._target.vocabulary.meanings[token]
            if isinstance(meaning, bytes):
                text += self._decoder.decode(self._target.strip(meaning) if self._fresh else meaning)
                self._fresh = False
            elif meaning is not None:
                kept = min(kept, self._write(text + self._decoder.decode(b"", final=True)))
                text = ""
                self._begin_segment(meaning)
        return min(kept, self._write(text))

    def translate(self, draft: Sequence[int]) -> Translation:
        """What the target would have to write to follow a draft, with which the drafter goes on after `tokens`.

        Nothing if the draft contradicts the committed bytes of a character that is not whole yet, or if the target
        can't write it. What comes after a control token that the target lacks is left out.
        """
        data, end = self._spoken(draft)
        pending = self.pending
        if not data.startswith(pending):
            return Translation([], 0)
        data = data[len(pending) :]
        head = data[: len(data) - len(data.lstrip(_CONTINUATION))] if pending else b""
        text = _whole_characters(data[len(head) :])
        first, rest = self._target.spell_bytes(head), self._spell(text)
        if first is None or rest is None:
            return Translation(first or [], len(first or []))
        if end is not None and len(head) + len(text.encode()) == len(data):
            tokens = [*first, *rest, end]
            return Translation(tokens, len(tokens))
        return Translation(first + rest, len(first) + self._certain(text, rest))

    def _begin_segment(self, control: str | None) -> None:
        """After a control token, or with the text."""
        if control is not None and control in self._drafter.vocabulary.ids:
            self.tokens.append(self._drafter.vocabulary.ids[control])
        self._start = len(self.tokens)  # the drafter's tokens before the segment
        self._text = bytearray()  # whole characters; U+FFFD for bytes that are none
        self._decoder = _new_decoder("replace")  # holds the bytes of a character that is not whole
        self._fresh = True

    def _write(self, text: str) -> int:
        """Append to the segment. Returns how many of the drafter's tokens are what they were."""
        if not text:
            return len(self.tokens)
        cut = self._last_word()
        tail = bytes(self._drafter.vocabulary.decode_bytes(self.tokens[cut:]))
        written = None
        if cut > self._start and self._text.endswith(tail):
            written = self._drafter.encode_continuation(tail.decode() + text)
        self._text += text.encode()
        if written is None:
            cut, written = self._start, self._drafter.encode(self._text.decode())
        kept = cut + _common(self.tokens[cut:], written)
        self.tokens[kept:] = written[kept - cut :]
        return kept

    def _last_word(self) -> int:
        """Where the last of the segment's tokens is with which a word begins; the segment's first if there is none."""
        at = len(self.tokens)
        after = b""
        while at > self._start:
            at -= 1
            data = self._drafter.vocabulary.decode_bytes(self.tokens[at : at + 1])
            if after and not data[-1:].isspace():
                return at + 1
            after = data if data.startswith(b" ") and not data[1:2].isspace() and data[1:] else b""
        return at

    def _spoken(self, draft: Sequence[int]) -> tuple[bytes, int | None]:
        """A draft's bytes up to its first control token, and the target's token of the same role, if there is one."""
        data, end = b"", None
        for token in draft:
            meaning = self._drafter.vocabulary.meanings[token]
            if not isinstance(meaning, bytes):
                end = None if meaning is None else self._target.vocabulary.ids.get(meaning)
                break
            data += meaning
        return self._drafter.strip(data) if not self._text else data, end

    def _spell(self, text: str) -> list[int] | None:
        """The target's tokens of a text that comes after what is committed."""
        return self._target.encode_start(text) if self._fresh else self._target.encode_continuation(text)

    def _certain(self, text: str, tokens: Sequence[int]) -> int:
        """How many of the target's tokens for the text end with a word that is complete."""
        spelled = self._target.vocabulary.decode_bytes
        sure = text[: _last_boundary(text, words_end_at_signs=self._target.vocabulary.convention == "byte_level")]
        left = len(sure.encode()) + len(spelled(tokens)) - len(text.encode())
        for i in range(len(tokens)):
            left -= len(spelled(tokens[i : i + 1]))
            if left < 0:
                return i
        return len(tokens)


def _whole_characters(data: bytes) -> str:
    """The text, up to the first bytes that are no character, or not yet."""
    try:
        return _new_decoder().decode(data)
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def _last_boundary(text: str, *, words_end_at_signs: bool) -> int:
    """The last place over which no token reaches, whatever comes after the text; 0 if there is none.

    Tokenizers let a space begin a token, never end one that has other characters, and byte-level ones part letters from
    signs.
    """
    for at in range(len(text) - 1, 0, -1):
        before, after = text[at - 1], text[at]
        if after == " " and not before.isspace() and not text[at + 1 : at + 2].isspace() and at + 1 < len(text):
            return at
        if words_end_at_signs and before.isalpha() and not (after.isalnum() or unicodedata.category(after)[0] == "M"):
            return at
    return 0


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
