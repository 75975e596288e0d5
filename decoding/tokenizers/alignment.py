"""Compares two vocabularies: how well a drafter or a member can follow a text in its own tokens."""

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from decoding.tokenizers.vocabulary import Vocabulary

_MIN_SPELLABLE = 0.5  # share of a vocabulary's tokens; below it most drafts would be cut short


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
        return (
            f"{self.shared} of {self.other_size} token strings are among the target's {self.target_size} "
            f"({self.shared / max(self.other_size, 1):.0%}), {self.same_ids} with the same id; {self.spellable} can "
            f"be written in its tokens; any byte can be written by {self._byte_spellers()}"
        )

    def _byte_spellers(self) -> str:
        match self.target_spells_any_byte, self.other_spells_any_byte:
            case True, True:
                return "both"
            case False, False:
                return "neither"
            case target, _:
                return "the target alone" if target else "the other alone"


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


def counterparts(vocabulary: Vocabulary, other: Vocabulary) -> Tensor:
    """Return the other vocabulary's id of each token's string, or −1: [V] int64.

    Each of the other's ids occurs at most once, so a permuted distribution stays a distribution.
    """
    if _identical(vocabulary, other):
        return torch.arange(vocabulary.size)
    ids = torch.full((vocabulary.size,), -1, dtype=torch.int64)
    for meaning, token in vocabulary.ids.items():
        ids[token] = other.ids.get(meaning, -1)
    return ids


def _spellable(writer: Vocabulary, other: Vocabulary) -> int:
    """Return the number of the other vocabulary's text tokens that the writer can spell."""
    return sum(map(writer.can_spell, (meaning for meaning in other.meanings if isinstance(meaning, bytes))))


def _identical(first: Vocabulary, second: Vocabulary) -> bool:
    return all(a == b for a, b in zip_longest(first.meanings, second.meanings))
