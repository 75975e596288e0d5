"""Projects a member's logits onto its leader's vocabulary, by the bytes that tokens stand for.

A token that both have keeps its logit. A token that the leader lacks gives its probability to the first token with
which the leader would write it, if there is one. Knows nothing of models or texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.kernels.log_add import log_add
from decoding.tokenizers.text_aligner import Speller
from decoding.tokenizers.vocabulary import Meaning

_NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Maps a member's U tokens to its leader's V tokens. Each token maps to one at most."""

    targets: Tensor  # [U] int64: the leader's token for each of the member's, or −1
    exact: Tensor  # [V] int64: the member's token of the same string, or −1
    others: Tensor  # [E] int64: the member's tokens that map to a token, but not exactly
    merged_index: Tensor  # [E] int64: indices in `merged`, one for each of the others
    merged: Tensor  # [F] int64: the leader's tokens to which others map
    stand_ins: Tensor  # [V] int64: for tokens without a source, the member's first token of their spelling, or −1

    @classmethod
    def build(cls, leader: Speller, member: Speller, *, fresh: bool = False) -> "Projection":
        """Build the map. fresh: for the first token of a text, to which some tokenizers add a space."""
        targets = torch.full((member.vocabulary.size,), -1, dtype=torch.int64)
        exact = torch.full((leader.vocabulary.size,), -1, dtype=torch.int64)
        others: list[int] = []
        for token, meaning in _meanings(member, fresh=fresh):
            target = leader.first_token(meaning, fresh=fresh)
            targets[token] = target
            is_same = target >= 0 and leader.meaning(target, fresh=fresh) == meaning
            if is_same and exact[target] < 0:
                exact[target] = token
            elif target >= 0:
                others.append(token)
        merged, merged_index = targets[others].unique(return_inverse=True)
        stand_ins = torch.full_like(exact, -1)
        has_no_source = exact < 0
        has_no_source[merged] = False
        for token, meaning in _meanings(leader, fresh=fresh):
            if has_no_source[token]:
                stand_ins[token] = member.first_token(meaning, fresh=fresh)
        return cls(targets, exact, torch.tensor(others, dtype=torch.int64), merged_index, merged, stand_ins)

    def __call__(self, logits: Tensor, *, complete: bool = False) -> Tensor:
        """Return the member's distribution over the leader's tokens. Tokens without a source are impossible.

        Args:
            logits: [N, U or more] on the CPU, where sums have a fixed order.
            complete: give tokens without a source the logit of their stand-in (Yao et al., arXiv 2410.03777). The
                result is no distribution, but its tokens can be compared.

        Returns:
            [N, V] float32, −∞ for impossible tokens.
        """
        logits = logits.float()
        projected = _pick(logits, self.exact)
        if len(self.others):
            best = logits.amax(dim=-1, keepdim=True)
            sums = torch.zeros(len(logits), len(self.merged)).index_add_(
                -1, self.merged_index, (logits[:, self.others] - best).exp()
            )
            projected[:, self.merged] = log_add(projected[:, self.merged], sums.log() + best)
        return torch.maximum(projected, _pick(logits, self.stand_ins)) if complete else projected

    def best(self, logits: Tensor, count: int) -> list[list[int]]:
        """Return the leader's tokens for the member's `count` most probable ones, [N]. logits: [N, U or more]."""
        tokens = logits.topk(min(count, len(self.targets)), dim=-1).indices.cpu()
        targets = self.targets[tokens.clamp(max=len(self.targets) - 1)]
        return [[token for token in dict.fromkeys(row) if token >= 0] for row in targets.tolist()]


def _meanings(speller: Speller, *, fresh: bool) -> Iterator[tuple[int, Meaning]]:
    """Yield tokens and what they stand for. Among equals, the one that the tokenizer writes comes first."""
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
    """Return the logits of the sources, [N, V], −∞ where there is none. sources: [V] int64 or −1."""
    return logits.index_select(-1, sources.clamp(min=0)).masked_fill(sources < 0, _NEG_INF)
