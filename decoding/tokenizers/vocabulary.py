"""A tokenizer's tokens as the bytes that they stand for, so that tokens of different tokenizers can be compared.

A tokenizer is a table of token strings, in one of two conventions: byte-level (a printable character for each byte, as
in GPT-2) and SentencePiece (▁ for a space, <0x0A> for a single byte).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

Convention = Literal["byte_level", "sentencepiece", "plain"]
Meaning = bytes | str  # what a token stands for: bytes of the text, or the role or name of a control token

_SPACE = "▁"
_SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MIN_SPELLABLE = 0.5  # share of a vocabulary's tokens; below it most drafts would be cut short


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


@dataclass(frozen=True, slots=True)
class Compatibility:
    """How the vocabulary of a drafter or member (the other) fits the vocabulary of the target or leader."""

    identical: bool  # whether tokens need no translation
    target_size: int  # tokens, without unused ids
    other_size: int
    shared: int  # token strings in both, including control tokens of the same role
    same_ids: int  # shared token strings with the same id
    spellable: int  # tokens of the other that the target can write
    readable: int  # tokens of the target that the other can write
    shares_end: bool  # whether both have a control token of the role "eos"
    target_spells_any_byte: bool
    other_spells_any_byte: bool

    @property
    def drafting_obstacle(self) -> str | None:
        """The reason why drafts can't be translated; None if they can."""
        if self.spellable < _MIN_SPELLABLE * self.other_size:
            return (
                f"the target's tokenizer can write only {self.spellable} of the drafter's {self.other_size} tokens; "
                f"at least half are needed"
            )
        return None

    @property
    def blending_obstacle(self) -> str | None:
        """The reason why the two can't be members of one ensemble; None if they can."""
        if not self.shares_end:
            return 'no token with the role "eos" in both, so the members would never agree on the end of a text'
        if self.spellable < _MIN_SPELLABLE * self.other_size:
            return (
                f"the leader can write only {self.spellable} of its {self.other_size} tokens; at least half are needed"
            )
        if self.readable < _MIN_SPELLABLE * self.target_size:
            return (
                f"it can write only {self.readable} of the leader's {self.target_size} tokens; at least half are needed"
            )
        return None

    def __str__(self) -> str:
        if self.identical:
            return f"the same {self.target_size} tokens"
        if self.target_spells_any_byte == self.other_spells_any_byte:
            spellers = "both" if self.target_spells_any_byte else "neither"
        else:
            spellers = "the target alone" if self.target_spells_any_byte else "the other alone"
        return (
            f"{self.shared} of {self.other_size} token strings are among the target's {self.target_size} "
            f"({self.shared / max(self.other_size, 1):.0%}), {self.same_ids} with the same id; {self.spellable} can "
            f"be written in its tokens; any byte can be written by {spellers}"
        )


def compare_vocabularies(target: Vocabulary, other: Vocabulary) -> Compatibility:
    """Compare the vocabulary of a target with another."""
    shared = target.ids.keys() & other.ids.keys()
    controls = sum(isinstance(meaning, str) for meaning in shared)
    return Compatibility(
        identical=_identical(target, other),
        target_size=sum(meaning is not None for meaning in target.meanings),
        other_size=sum(meaning is not None for meaning in other.meanings),
        shared=len(shared),
        same_ids=sum(target.ids[meaning] == other.ids[meaning] for meaning in shared),
        spellable=_spellable(target, other) + controls,
        readable=_spellable(other, target) + controls,
        shares_end="eos" in shared,
        target_spells_any_byte=target.spells_any_byte,
        other_spells_any_byte=other.spells_any_byte,
    )


def counterparts(vocabulary: Vocabulary, other: Vocabulary) -> list[int]:
    """Return the other vocabulary's id of each token's string, or −1: [V].

    Each of the other's ids occurs at most once, so a permuted distribution stays a distribution.
    """
    if _identical(vocabulary, other):
        return list(range(vocabulary.size))
    ids = [-1] * vocabulary.size
    for meaning, token in vocabulary.ids.items():
        ids[token] = other.ids.get(meaning, -1)
    return ids


def _spellable(writer: Vocabulary, other: Vocabulary) -> int:
    """Return the number of the other vocabulary's text tokens that the writer can spell."""
    return sum(map(writer.can_spell, (meaning for meaning in other.meanings if isinstance(meaning, bytes))))


def _identical(first: Vocabulary, second: Vocabulary) -> bool:
    return all(a == b for a, b in zip_longest(first.meanings, second.meanings))
