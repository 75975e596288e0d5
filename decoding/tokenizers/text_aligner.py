"""Translates texts and drafts between tokenizers, through bytes.

This is string-level matching (Timor et al., arXiv 2502.05202). A translation that differs from what the target would
write costs a draft, never correctness.
"""

import unicodedata
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

from decoding.tokenizers.vocabulary import Meaning, Vocabulary

# Contexts before a text that is not the start of one. No token joins the private-use character with what follows.
_CONTEXTS = ("", "\ue000")
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first
_new_decoder = getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Translation:
    """A draft in the target's tokens. Tokens that are not certain are right if the draft's last word is complete."""

    tokens: list[int]
    certain: int  # number of tokens that hold whatever text follows the draft


class Speller:
    """Writes text in the tokens of one tokenizer."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        """encode: text to ids, without special tokens."""
        self.vocabulary = vocabulary
        self.encode = encode
        self.adds_space = vocabulary.decode_bytes(encode("a")) == b" a"

    def strip(self, data: bytes) -> bytes:
        """Return the bytes of a text's first tokens without the space that the tokenizer adds there."""
        return data[1:] if self.adds_space and data.startswith(b" ") else data

    def encode_continuation(self, text: str) -> list[int] | None:
        """Return the tokens of a text that follows other text; None if they would not spell it exactly."""
        data = text.encode()
        for context in _CONTEXTS:
            tokens = self._suffix(self.encode(context + text), data)
            if tokens is not None:
                return tokens
        return None

    def encode_start(self, text: str) -> list[int] | None:
        """Return the tokens of a text from its start; None if they would not spell it exactly."""
        tokens = self.encode(text)
        return tokens if self.strip(self.vocabulary.decode_bytes(tokens)) == text.encode() else None

    def meaning(self, token: int, *, fresh: bool) -> Meaning | None:
        """Return what a token stands for. fresh: at the start of a text."""
        meaning = self.vocabulary.meanings[token]
        return self.strip(meaning) if fresh and isinstance(meaning, bytes) else meaning

    def first_token(self, meaning: Meaning, *, fresh: bool) -> int:
        """Return the first token of its spelling of a meaning, or of the longest prefix that it can spell; else −1."""
        ids = self.vocabulary.ids
        if isinstance(meaning, str):
            return ids.get(meaning, -1)
        space = b" " if fresh and self.adds_space else b""
        data = space + meaning
        if data in ids:
            return ids[data]
        text = _complete_characters(meaning)
        if text.encode() == meaning:
            tokens = self.encode_start(text) if fresh else self.encode_continuation(text)
            if spelling := [token for token in tokens or () if self.vocabulary.decode_bytes([token])]:
                return spelling[0]
        prefixes = (data[:length] for length in range(len(data) - 1, len(space), -1))
        return next((ids[prefix] for prefix in prefixes if prefix in ids), -1)

    def spell_bytes(self, data: bytes) -> list[int] | None:
        """Return a token per byte; None if one is missing."""
        tokens = [self.vocabulary.ids.get(bytes([byte]), -1) for byte in data]
        return None if -1 in tokens else tokens

    def _suffix(self, tokens: list[int], data: bytes) -> list[int] | None:
        """Return the last tokens if they spell exactly the data."""
        start, length = len(tokens), 0
        while length < len(data) and start > 0:
            start -= 1
            length += len(self.vocabulary.decode_bytes(tokens[start : start + 1]))
        return tokens[start:] if self.vocabulary.decode_bytes(tokens[start:]) == data else None


class TextAligner:
    """Keeps a text of the target in the drafter's tokens, and translates drafts into the target's.

    Control tokens are translated by their role; those that the other tokenizer lacks are left out. A segment is the
    text between two control tokens.
    """

    def __init__(self, target: Speller, drafter: Speller, prefix: Sequence[int] = ()) -> None:
        """prefix: the drafter's tokens before any text, if it needs a "bos" that the target lacks."""
        self._target, self._drafter = target, drafter
        self.tokens = list(prefix)  # the committed text up to its last complete character, in the drafter's tokens
        self._fresh = True  # whether the segment is empty
        self._begin_segment(None)

    @classmethod
    def for_text(cls, target: Speller, drafter: Speller, tokens: Sequence[int], *, begins_texts: bool) -> "TextAligner":
        """Create an aligner for a text that starts with these tokens of the target, without committing them.

        begins_texts: whether the drafter expects "bos" before a text; it is added unless the target has it.
        """
        bos = drafter.vocabulary.ids.get("bos") if begins_texts else None
        has_bos = target.vocabulary.meanings[tokens[0]] == "bos"
        return cls(target, drafter, () if has_bos or bos is None else (bos,))

    def fork(self) -> "TextAligner":
        """Return a copy that continues independently."""
        other = copy(self)
        other.tokens, other._text = self.tokens.copy(), self._text.copy()
        other._decoder = _new_decoder("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    @property
    def pending(self) -> bytes:
        """The committed bytes of an incomplete character, which `tokens` lack."""
        return self._decoder.getstate()[0]

    @property
    def fresh(self) -> bool:
        """Whether no text is committed since the start or the last control token."""
        return self._fresh

    def commit(self, tokens: Sequence[int]) -> int:
        """Append committed tokens of the target.

        Returns:
            The number of the drafter's tokens that did not change. The rest may be written in another way, because the
            text goes on. Costs time for the last words, or for the segment if it has no spaces.
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
        """Translate a draft that follows `tokens` into the target's tokens.

        Empty if the draft contradicts `pending`, or if the target can't write it. Tokens after a control token that the
        target lacks are left out.
        """
        data, control = self._decode(draft)
        pending = self.pending
        if not data.startswith(pending):
            return Translation([], 0)
        data = data[len(pending) :]
        head = data[: len(data) - len(data.lstrip(_CONTINUATION))] if pending else b""
        text = _complete_characters(data[len(head) :])
        first, rest = self._target.spell_bytes(head), self._spell(text)
        if first is None or rest is None:
            return Translation(first or [], len(first or []))
        if control is not None and len(head) + len(text.encode()) == len(data):
            tokens = [*first, *rest, control]
            return Translation(tokens, len(tokens))
        return Translation(first + rest, len(first) + self._count_certain(text, rest))

    def _begin_segment(self, control: str | None) -> None:
        """Start a segment after a control token, or at the start of the text."""
        if control is not None and control in self._drafter.vocabulary.ids:
            self.tokens.append(self._drafter.vocabulary.ids[control])
        self._start = len(self.tokens)  # the drafter's tokens before the segment
        self._text = bytearray()  # complete characters; U+FFFD for invalid bytes
        self._decoder = _new_decoder("replace")  # holds the bytes of an incomplete character
        self._fresh = True

    def _write(self, text: str) -> int:
        """Append to the segment. Returns the number of the drafter's tokens that did not change."""
        if not text:
            return len(self.tokens)
        cut = self._last_word_start()
        tail = bytes(self._drafter.vocabulary.decode_bytes(self.tokens[cut:]))
        tokens = None
        if cut > self._start and self._text.endswith(tail):
            tokens = self._drafter.encode_continuation(tail.decode() + text)
        self._text += text.encode()
        if tokens is None:
            cut, tokens = self._start, self._drafter.encode(self._text.decode())
        kept = cut + _common_prefix(self.tokens[cut:], tokens)
        self.tokens[kept:] = tokens[kept - cut :]
        return kept

    def _last_word_start(self) -> int:
        """Return the index of the segment's last token that begins a word, or else of its first token."""
        index = len(self.tokens)
        word = b""
        while index > self._start:
            index -= 1
            data = self._drafter.vocabulary.decode_bytes(self.tokens[index : index + 1])
            if word and not data[-1:].isspace():
                return index + 1
            word = data if data.startswith(b" ") and not data[1:2].isspace() and data[1:] else b""
        return index

    def _decode(self, draft: Sequence[int]) -> tuple[bytes, int | None]:
        """Return a draft's bytes up to its first control token, and the target's token of that role, if any."""
        data, control = b"", None
        for token in draft:
            meaning = self._drafter.vocabulary.meanings[token]
            if not isinstance(meaning, bytes):
                control = None if meaning is None else self._target.vocabulary.ids.get(meaning)
                break
            data += meaning
        return self._drafter.strip(data) if not self._text else data, control

    def _spell(self, text: str) -> list[int] | None:
        """Return the target's tokens of a text that follows the committed text."""
        return self._target.encode_start(text) if self._fresh else self._target.encode_continuation(text)

    def _count_certain(self, text: str, tokens: Sequence[int]) -> int:
        """Return the number of the target's tokens for the text that lie within complete words."""
        decode_bytes = self._target.vocabulary.decode_bytes
        is_byte_level = self._target.vocabulary.convention == "byte_level"
        certain = text[: _last_boundary(text, splits_punctuation=is_byte_level)]
        remaining = len(certain.encode()) + len(decode_bytes(tokens)) - len(text.encode())
        for i in range(len(tokens)):
            remaining -= len(decode_bytes(tokens[i : i + 1]))
            if remaining < 0:
                return i
        return len(tokens)


def _complete_characters(data: bytes) -> str:
    """Return the text up to the first bytes that are no complete character."""
    try:
        return _new_decoder().decode(data)
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def _last_boundary(text: str, *, splits_punctuation: bool) -> int:
    """Return the last index that no token spans, whatever follows the text; 0 if there is none.

    A space may begin a token, but not end one that has other characters. Byte-level tokenizers also separate letters
    from punctuation.
    """
    for index in range(len(text) - 1, 0, -1):
        before, after = text[index - 1], text[index]
        if after == " " and not before.isspace() and index + 1 < len(text) and not text[index + 1].isspace():
            return index
        if splits_punctuation and before.isalpha() and not (after.isalnum() or unicodedata.category(after)[0] == "M"):
            return index
    return 0


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class CopiedText:
    """The counterpart of `TextAligner` for such vocabularies. Leaves out tokens that the member lacks."""

    pending = b""  # no bytes wait for the rest of a character
    fresh = False  # no token changes its meaning at the start of a text

    def __init__(self, leader: Vocabulary, member: Vocabulary, tokens: Sequence[int] = ()) -> None:
        """tokens: the text so far, in the member's tokens."""
        self._leader, self._member = leader, member
        self.tokens = list(tokens)

    def fork(self) -> "CopiedText":
        """Return a copy that continues independently."""
        return CopiedText(self._leader, self._member, self.tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens of the leader."""
        for token in tokens:
            meaning = self._leader.meanings[token]
            if meaning is not None and meaning in self._member.ids:
                self.tokens.append(self._member.ids[meaning])
