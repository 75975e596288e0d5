"""Token strings that several vocabularies share: what members of an ensemble are blended on, what drafts are made of.

The ids of the first vocabulary, the leader's, stay what they are: the text is in its tokens, and so is the noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from decoding.errors import ConfigError
from decoding.vocabulary import Vocabulary

AlignmentKind = Literal["shared", "union"]

_NEG_INF = float("-inf")
_ASCII = [bytes([byte]) for byte in (0x0A, *range(0x20, 0x7F))]
_LEAST_SPELLABLE = 0.5  # of a drafter's tokens; with fewer, most drafts would break off at once


@dataclass(frozen=True, slots=True)
class Compatibility:
    """How two vocabularies fit together: a target's and a drafter's, or a leader's and another member's."""

    identical: bool  # whether tokens need no translation
    target_size: int  # tokens, without ids that stand for nothing
    drafter_size: int
    shared: int  # token strings that both have, control tokens of the same role included
    same_ids: int  # those of them that have the same id
    spellable: int  # tokens of the drafter whose text can be written in the target's tokens
    missing_ascii: str  # characters that are a token of the target, but not of the drafter
    shares_end: bool  # whether both have a control token of the role "eos"
    target_spells_any_byte: bool
    drafter_spells_any_byte: bool

    @property
    def drafting_obstacle(self) -> str | None:
        """Why no drafts can come through text; None if they can."""
        if self.spellable < _LEAST_SPELLABLE * self.drafter_size:
            return (
                f"the target's tokenizer can write only {self.spellable} of the drafter's {self.drafter_size} tokens; "
                f"at least half are needed"
            )
        return None

    def blending_obstacle(self, kind: AlignmentKind) -> str | None:
        """Why the two can't be members of one ensemble; None if they can."""
        if not self.shares_end:
            return 'no token with the role "eos" in both, so the members would never agree on the end of a text'
        if kind == "shared" and self.missing_ascii:
            return (
                f"the other member has no token for {self.missing_ascii[:20]!r}, so hardly a text could be written in "
                f"the tokens that both have; align their union instead"
            )
        return None

    def __str__(self) -> str:
        if self.identical:
            return f"the same {self.target_size} tokens"
        return (
            f"{self.shared} of {self.drafter_size} token strings are among the target's {self.target_size} "
            f"({self.shared / max(self.drafter_size, 1):.0%}), {self.same_ids} with the same id; {self.spellable} can "
            f"be written in its tokens; any byte can be written by {self._byte_spellers()}"
        )

    def _byte_spellers(self) -> str:
        match self.target_spells_any_byte, self.drafter_spells_any_byte:
            case True, True:
                return "both"
            case False, False:
                return "neither"
            case target, _:
                return "the target alone" if target else "the drafter alone"


def compare(target: Vocabulary, drafter: Vocabulary) -> Compatibility:
    """What the two have in common."""
    shared = target.ids.keys() & drafter.ids.keys()
    texts = [meaning for meaning in drafter.meanings if isinstance(meaning, bytes)]
    return Compatibility(
        identical=_identical(target, drafter),
        target_size=sum(meaning is not None for meaning in target.meanings),
        drafter_size=sum(meaning is not None for meaning in drafter.meanings),
        shared=len(shared),
        same_ids=sum(target.ids[meaning] == drafter.ids[meaning] for meaning in shared),
        spellable=sum(map(target.can_spell, texts)) + sum(isinstance(meaning, str) for meaning in shared),
        missing_ascii="".join(char.decode() for char in _ASCII if char in target.ids and char not in shared),
        shares_end="eos" in shared,
        target_spells_any_byte=target.spells_any_byte,
        drafter_spells_any_byte=drafter.spells_any_byte,
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


def _identical(first: Vocabulary, second: Vocabulary) -> bool:
    return all(one == other for one, other in zip_longest(first.meanings, second.meanings))


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """The token strings on which M members are blended, and where each member has them."""

    sources: Tensor  # [M, U] int64: the member's id of each token string, −1 where it has none
    texts: tuple[bytes, ...]  # what the ids from the leader's V on stand for; empty if shared

    @classmethod
    def build(cls, vocabularies: Sequence[Vocabulary], kind: AlignmentKind) -> "Alignment":
        """On the token strings of all members, or of any: the leader's ids 0…V−1, then those that it lacks.

        A union gives a token a probability of 0 by the members that lack it (Yu et al., arXiv 2406.12585). When a
        token that the leader lacks is chosen, the leader writes its text in tokens of its own.

        Args:
            vocabularies: [M], the leader's first.
            kind: shared: U = V, and only what all members have is possible. union: U ≥ V.

        Raises:
            ConfigError: a member's vocabulary has too little in common with the leader's.
        """
        leader, *others = vocabularies
        for i, other in enumerate(others, start=1):
            obstacle = compare(leader, other).blending_obstacle(kind)
            if obstacle:
                raise ConfigError(f"members 0 and {i} can't be blended: {obstacle}")
        sources = torch.stack([torch.arange(leader.size), *(counterparts(leader, other) for other in others)])
        if kind == "shared":
            return cls(sources.masked_fill((sources < 0).any(dim=0), -1), ())
        texts = dict.fromkeys(text for other in others for text in other.ids if isinstance(text, bytes))
        extra = tuple(text for text in texts if text not in leader.ids)
        beyond = [[vocabulary.ids.get(text, -1) for text in extra] for vocabulary in vocabularies]
        return cls(torch.cat((sources, torch.tensor(beyond, dtype=torch.int64)), dim=1), extra)

    @property
    def size(self) -> int:
        """U."""
        return self.sources.shape[1]

    @property
    def is_identity(self) -> bool:
        """Whether all members have the same ids for all, so that nothing needs to be moved."""
        return bool((self.sources == torch.arange(self.size, device=self.sources.device)).all())

    def to(self, device: torch.device | str) -> "Alignment":
        return Alignment(self.sources.to(device), self.texts)

    def project(self, logits: Tensor, member: int) -> Tensor:
        """A member's logits on the common token strings: [N, V of the member or more] to [N, U], −∞ if it lacks one."""
        sources = self.sources[member]
        return logits.index_select(-1, sources.clamp(min=0)).masked_fill(sources < 0, _NEG_INF)


def keep_best(logits: Tensor, count: int) -> Tensor:
    """Rule out what is among no member's `count` most probable tokens: the top-k union.

    Yao et al., arXiv 2410.07753. logits: [M, N, U]; returns the same shape.
    """
    best = torch.zeros_like(logits, dtype=torch.bool)
    best.scatter_(-1, logits.topk(min(count, logits.shape[-1]), dim=-1).indices, True)
    return logits.masked_fill(~best.any(dim=0), _NEG_INF)
