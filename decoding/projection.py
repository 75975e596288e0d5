"""A member's logits as logits of its leader's tokens, by the bytes that the tokens of both stand for.

A token that both have keeps its logit. The probability of one that the leader lacks goes to the first token with which
the leader would write it; of one that it can't even begin to write, nowhere. Knows nothing of models or texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.text_aligner import Speller
from decoding.vocabulary import Meaning

_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Of a member's vocabulary, of U tokens, on its leader's, of V. Each of the member's tokens goes to one at most."""

    places: Tensor  # [U] int64: where each of the member's tokens goes, −1 for nowhere
    exact: Tensor  # [V] int64: the member's token of the same string, −1 where it has none
    others: Tensor  # [E] int64: the member's tokens that go somewhere beside these
    shares: Tensor  # [E] int64: to which of the merged ones each of them goes
    merged: Tensor  # [F] int64: the leader's tokens to which any of the others go
    stand_ins: (
        Tensor  # [V] int64: of tokens to which none goes, the first with which the member would write them, or −1
    )

    @classmethod
    def build(cls, leader: Speller, member: Speller, *, fresh: bool = False) -> "Projection":
        """fresh: of the first token of a text, where some tokenizers write a space that is not there."""
        places = torch.full((member.vocabulary.size,), -1, dtype=torch.int64)
        exact = torch.full((leader.vocabulary.size,), -1, dtype=torch.int64)
        others: list[int] = []
        for token, meaning in _meanings(member, fresh=fresh):
            place = leader.first(meaning, fresh=fresh)
            places[token] = place
            same = place >= 0 and leader.meaning(place, fresh=fresh) == meaning
            if same and exact[place] < 0:
                exact[place] = token
            elif place >= 0:
                others.append(token)
        merged, shares = places[others].unique(return_inverse=True)
        stand_ins = torch.full_like(exact, -1)
        lacking = exact < 0
        lacking[merged] = False
        for token, meaning in _meanings(leader, fresh=fresh):
            if lacking[token]:
                stand_ins[token] = member.first(meaning, fresh=fresh)
        return cls(places, exact, torch.tensor(others, dtype=torch.int64), shares, merged, stand_ins)

    def __call__(self, logits: Tensor, *, complete: bool = False) -> Tensor:
        """The member's distribution over the leader's tokens: those to which none goes are impossible.

        Args:
            logits: [N, U or more] on the CPU, where sums have one order.
            complete: give tokens to which none goes the logit of the first token with which the member would write
                them, as Yao et al. do (arXiv 2410.03777). Then it is no distribution, but any few can be compared.

        Returns:
            [N, V] float32, −∞ for what is impossible.
        """
        logits = logits.float()
        found = _pick(logits, self.exact)
        if len(self.others):
            best = logits.amax(dim=-1, keepdim=True)
            sums = torch.zeros(len(logits), len(self.merged)).index_add_(
                -1, self.shares, (logits[:, self.others] - best).exp()
            )
            found[:, self.merged] = torch.logaddexp(found[:, self.merged], sums.log() + best)
        return torch.maximum(found, _pick(logits, self.stand_ins)) if complete else found

    def best(self, logits: Tensor, count: int) -> list[list[int]]:
        """The leader's tokens to which the member's most probable ones go, for each position, the best first."""
        tokens = logits.topk(min(count, len(self.places)), dim=-1).indices.cpu()
        places = self.places[tokens.clamp(max=len(self.places) - 1)]
        return [[place for place in dict.fromkeys(row) if place >= 0] for row in places.tolist()]


def _meanings(speller: Speller, *, fresh: bool) -> Iterator[tuple[int, Meaning]]:
    """Each token and what it stands for, of those that stand for the same the one that is written first."""
    vocabulary = speller.vocabulary
    tokens = sorted(
        (token for token, meaning in enumerate(vocabulary.meanings) if meaning is not None),
        key=lambda token: (vocabulary.ids.get(vocabulary.meanings[token] or b"") != token, token),
    )
    for token in tokens:
        meaning = speller.meaning(token, fresh=fresh)
        if meaning is not None:
            yield token, meaning


def _pick(logits: Tensor, sources: Tensor) -> Tensor:
    """[N, V]: the logits of these tokens, −∞ where there is none. sources: [V] int64."""
    return logits.index_select(-1, sources.clamp(min=0)).masked_fill(sources < 0, _NEG_INF)
