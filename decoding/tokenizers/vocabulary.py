"""A tokenizer's tokens as the bytes that they stand for, so that tokens of different tokenizers can be compared.

Knows tokenizers only as tables of token strings, in one of two conventions: byte-level (a printable character for each
byte, as in GPT-2) and SentencePiece (▁ for a space, <0x0A> for a single byte).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Convention = Literal["byte_level", "sentencepiece", "plain"]
Meaning = bytes | str  # what a token stands for: bytes of the text, or the role or name of a control token

_SPACE = "▁"
_SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character: visible bytes are themselves, others the next free code point from 256."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_level_alphabet()


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of one tokenizer, by id and by what they stand for."""

    meanings: tuple[Meaning | None, ...]  # [V] by id; None: no such token
    ids: Mapping[Meaning, int]  # among equals the token that is not a single byte, then the lowest id
    convention: Convention

    @classmethod
    def build(
        cls,
        tokens: Mapping[str, int],
        *,
        control: Mapping[str, str] | None = None,
        added: Collection[str] = (),
        size: int | None = None,
        convention: Convention | None = None,
    ) -> "Vocabulary":
        """Build from a tokenizer's table.

        Args:
            tokens: ids by token string, all tokens included.
            control: roles of tokens that are not text, such as "eos" or "bos"; without a role the token string.
            added: other tokens that were added to the tokenizer, whose strings are plain text.
            size: V, the number of logits; None: the number of ids. Ids from V on are left out.
            convention: None: inferred from the token strings.
        """
        control = control or {}
        convention = convention or find_convention([token for token in tokens if token not in control])
        size = max(tokens.values(), default=-1) + 1 if size is None else size
        meanings: list[Meaning | None] = [None] * size
        for token, index in tokens.items():
            if index < size:
                meanings[index] = control.get(token) or token_bytes(token, "plain" if token in added else convention)
        single = {index for token, index in tokens.items() if _SINGLE_BYTE.fullmatch(token)}
        ids: dict[Meaning, int] = {}
        for index in sorted(range(size), key=lambda index: (index in single, index)):
            meaning = meanings[index]
            if meaning is not None:
                ids.setdefault(meaning, index)
        return cls(tuple(meanings), ids, convention)

    @property
    def size(self) -> int:
        """V."""
        return len(self.meanings)

    @property
    def spells_any_byte(self) -> bool:
        """Whether each of the 256 bytes is a token, so that any text can be written."""
        return all(bytes([byte]) in self.ids for byte in range(256))

    def can_spell(self, data: bytes) -> bool:
        """Whether one token has the bytes, or each of their characters is a token or can be written in single bytes."""
        if data in self.ids:
            return True
        characters = [char.encode("utf-8", "surrogateescape") for char in data.decode("utf-8", "surrogateescape")]
        return all(char in self.ids or all(bytes([byte]) in self.ids for byte in char) for char in characters)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of the tokens; control tokens have none."""
        return b"".join(meaning for meaning in (self.meanings[token] for token in tokens) if isinstance(meaning, bytes))


def token_bytes(token: str, convention: Convention) -> bytes:
    """Return the bytes of a text token."""
    if convention == "byte_level" and all(char in _BYTES for char in token):
        return bytes(_BYTES[char] for char in token)
    if convention == "sentencepiece":
        single = _SINGLE_BYTE.fullmatch(token)
        return bytes([int(single[1], 16)]) if single else token.replace(_SPACE, " ").encode()
    return token.encode()


def find_convention(tokens: Collection[str]) -> Convention:
    """Infer the convention from how tokens write spaces, or else from their single bytes."""
    spaces: dict[Convention, int] = {
        "sentencepiece": sum(token.startswith(_SPACE) for token in tokens),
        "byte_level": sum(token.startswith("Ġ") for token in tokens),
    }
    convention = max(spaces, key=spaces.__getitem__)
    if spaces[convention]:
        return convention
    known = set(tokens)
    if known.issuperset(_BYTES):
        return "byte_level"
    return "sentencepiece" if {"<0x00>", "<0xFF>"} <= known else "plain"
