"""A tokenizer's tokens as the bytes that they stand for, so that tokens of different tokenizers can be compared.

Knows tokenizers only as tables of token strings, in the two ways in which they are commonly written: byte-level (a
printable character for each byte, as GPT-2 has it) and SentencePiece (▁ for a space, <0x0A> for a lone byte).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Convention = Literal["byte_level", "sentencepiece", "plain"]
Meaning = bytes | str  # what a token stands for: bytes of the text, or the role or name of a control token

_SPACE = "▁"
_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character stands for: itself if it can be seen, else the next free one from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_level_alphabet()


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of one tokenizer, by id and by what they stand for."""

    meanings: tuple[Meaning | None, ...]  # [V] by id; None: no such token
    ids: Mapping[Meaning, int]  # of tokens that stand for the same, the one that is not a lone byte, then the lowest
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
        """From a tokenizer's table.

        Args:
            tokens: ids by token string, all tokens included.
            control: of tokens that are not text, the role: "eos", "bos", … by which tokenizers that write it
                differently agree, or for want of one the token string itself.
            added: other tokens that were added to the tokenizer, and so are written as they are.
            size: V, how many logits the model has; None: as many as there are ids. Ids from V on are left out.
            convention: None: found out from the token strings.
        """
        control = control or {}
        convention = convention or find_convention([token for token in tokens if token not in control])
        size = max(tokens.values(), default=-1) + 1 if size is None else size
        meanings: list[Meaning | None] = [None] * size
        for token, at in tokens.items():
            if at < size:
                meanings[at] = control.get(token) or token_bytes(token, "plain" if token in added else convention)
        lone = {at for token, at in tokens.items() if _LONE_BYTE.fullmatch(token)}
        ids: dict[Meaning, int] = {}
        for at in sorted(range(size), key=lambda at: (at in lone, at)):
            meaning = meanings[at]
            if meaning is not None:
                ids.setdefault(meaning, at)
        return cls(tuple(meanings), ids, convention)

    @property
    def size(self) -> int:
        """V."""
        return len(self.meanings)

    @property
    def spells_any_byte(self) -> bool:
        """Whether each of the 256 bytes is a token, so that there is no text that can't be written."""
        return all(bytes([byte]) in self.ids for byte in range(256))

    def can_spell(self, data: bytes) -> bool:
        """Whether it has the bytes as a token, or else every character of them, by itself or byte by byte."""
        if data in self.ids:
            return True
        characters = [char.encode("utf-8", "surrogateescape") for char in data.decode("utf-8", "surrogateescape")]
        return all(char in self.ids or all(bytes([byte]) in self.ids for byte in char) for char in characters)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """The bytes of the tokens; control tokens have none."""
        return b"".join(meaning for meaning in (self.meanings[token] for token in tokens) if isinstance(meaning, bytes))


def token_bytes(token: str, convention: Convention) -> bytes:
    """What a token of text stands for."""
    if convention == "byte_level" and all(char in _BYTES for char in token):
        return bytes(_BYTES[char] for char in token)
    if convention == "sentencepiece":
        lone = _LONE_BYTE.fullmatch(token)
        return bytes([int(lone[1], 16)]) if lone else token.replace(_SPACE, " ").encode()
    return token.encode()


def find_convention(tokens: Collection[str]) -> Convention:
    """How the tokens are written, by how they write spaces; by their single bytes if there are none."""
    spaces: dict[Convention, int] = {
        "sentencepiece": sum(token.startswith(_SPACE) for token in tokens),
        "byte_level": sum(token.startswith("Ġ") for token in tokens),
    }
    likely = max(spaces, key=spaces.__getitem__)
    if spaces[likely]:
        return likely
    known = set(tokens)
    if known.issuperset(_BYTES):
        return "byte_level"
    return "sentencepiece" if {"<0x00>", "<0xFF>"} <= known else "plain"
