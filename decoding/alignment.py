"""Token strings that two vocabularies share: how well a drafter or a member can follow a text in tokens of its own."""

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from decoding.vocabulary import Vocabulary

_LEAST_SPELLABLE = 0.5  # of a vocabulary's tokens; with fewer, most drafts would break off, most answers be lost


@dataclass(frozen=True, slots=True)
class Compatibility:
    """How two vocabularies fit together: a target's, and that of a drafter or of a member that the target leads."""

    identical: bool  # whether tokens need no translation
    target_size: int  # tokens, without ids that stand for nothing
    other_size: int
    shared: int  # token strings that both have, control tokens of the same role included
    same_ids: int  # those of them that have the same id
    spellable: int  # tokens of the other whose text can be written in the target's tokens
    readable: int  # tokens of the target whose text can be written in the other's tokens
    shares_end: bool  # whether both have a control token of the role "eos"
    target_spells_any_byte: bool
    other_spells_any_byte: bool

    @property
    def drafting_obstacle(self) -> str | None:
        """Why no drafts can come through text; None if they can."""
        if self.spellable < _LEAST_SPELLABLE * self.other_size:
            return (
                f"the target's tokenizer can write only {self.spellable} of the drafter's {self.other_size} tokens; "
                f"at least half are needed"
            )
        return None

    @property
    def blending_obstacle(self) -> str | None:
        """Why the two can't be members of one ensemble, even through text; None if they can."""
        if not self.shares_end:
            return 'no token with the role "eos" in both, so the members would never agree on the end of a text'
        if self.spellable < _LEAST_SPELLABLE * self.other_size:
            return (
                f"the leader can write only {self.spellable} of its {self.other_size} tokens; at least half are needed"
            )
        if self.readable < _LEAST_SPELLABLE * self.target_size:
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


def compare(target: Vocabulary, other: Vocabulary) -> Compatibility:
    """What the two have in common."""
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
    """[V] int64: the id of the other vocabulary's token of the same string, −1 where it has none.

    Each of the other's ids comes at most once, so that a distribution that is moved along stays one.
    """
    if _identical(vocabulary, other):
        return torch.arange(vocabulary.size)
    found = torch.full((vocabulary.size,), -1, dtype=torch.int64)
    for meaning, at in vocabulary.ids.items():
        found[at] = other.ids.get(meaning, -1)
    return found


def _spellable(writer: Vocabulary, other: Vocabulary) -> int:
    """How many tokens of text of the other vocabulary the writer can spell."""
    return sum(map(writer.can_spell, (meaning for meaning in other.meanings if isinstance(meaning, bytes))))


def _identical(first: Vocabulary, second: Vocabulary) -> bool:
    return all(one == other for one, other in zip_longest(first.meanings, second.meanings))
