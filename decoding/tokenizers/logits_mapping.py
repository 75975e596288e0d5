"""Maps a member's logits to the tokens of a leader with another tokenizer: see docs/ensembles.md.

Tokens are compared by the bytes that they stand for. A token that both have keeps its logit. A token that the leader
lacks gives its probability to the first token with which the leader would write it, if there is one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.errors import ConfigError
from decoding.sampling.processors import log_add
from decoding.tokenizers.text_aligner import CopiedText, Speller, TextAligner
from decoding.tokenizers.vocabulary import Meaning, compare_vocabularies

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


@dataclass(frozen=True, slots=True, eq=False)
class MemberContext:
    """A text in a member's tokens."""

    tokens: list[int]
    fresh: bool  # whether the next token is the first of a text
    unreadable: bool = False  # whether the member's tokens can't express the text, so that it predicts nothing

    def as_unreadable(self) -> "MemberContext":
        return MemberContext(self.tokens, self.fresh, unreadable=True)


@dataclass(frozen=True, slots=True, eq=False)
class LogitsMapping:
    """The mapping of one pair of tokenizers."""

    leader: Speller
    member: Speller
    begins_texts: bool  # whether the member expects its "bos" token before a text
    copies: bool  # whether both have the same strings, so that texts can be copied
    first: Projection  # of logits for the first token of a text
    later: Projection  # of all other logits

    @classmethod
    def build(cls, leader: Speller, member: Speller, *, begins_texts: bool = False) -> "LogitsMapping":
        """begins_texts: the member expects its "bos" token before a text.

        Raises ConfigError if the two have too little in common.
        """
        obstacle = compare_vocabularies(leader.vocabulary, member.vocabulary).blending_obstacle
        if obstacle:
            raise ConfigError(obstacle)
        strings = [
            {string for string in speller.vocabulary.ids if isinstance(string, bytes)} for speller in (leader, member)
        ]
        copies = strings[0] == strings[1]
        later = first = Projection.build(leader, member)
        if (leader.adds_space or member.adds_space) and not copies:
            first = Projection.build(leader, member, fresh=True)
        return cls(leader, member, begins_texts, copies, first, later)

    def can_map(self, tokens: Sequence[int]) -> bool:
        """Whether all tokens are in the leader's vocabulary."""
        return not tokens or (min(tokens) >= 0 and max(tokens) < self.leader.vocabulary.size)

    def begin(self, tokens: Sequence[int], prompt_length: int) -> TextAligner | CopiedText:
        """Begin a text of the leader's tokens.

        The prompt is aligned at once, generated tokens one by one, as when they are drafted. So the member's tokens
        depend on the text alone, not on how it was generated.
        """
        text: TextAligner | CopiedText = TextAligner.for_text(
            self.leader, self.member, tokens, begins_texts=self.begins_texts
        )
        if self.copies:
            text = CopiedText(self.leader.vocabulary, self.member.vocabulary, text.tokens)
        text.commit(tokens[:prompt_length])
        for token in tokens[prompt_length:]:
            text.commit([token])
        return text

    def context(self, text: TextAligner | CopiedText) -> MemberContext:
        """Return the text in the member's tokens. The bytes of an incomplete character are spelled one by one."""
        pending = self.member.spell_bytes(text.pending)
        return MemberContext([*text.tokens, *(pending or ())], text.fresh, unreadable=pending is None)

    def project(self, contexts: Sequence[MemberContext], logits: Tensor, count: int) -> tuple[Tensor, list[list[int]]]:
        """Project the member's logits to the leader's tokens.

        Args:
            contexts: [N].
            logits: [N, U] after each context; ignored where it is unreadable.
            count: the number of most probable tokens to return; above 0, projections are complete (`Projection`).

        Returns:
            [N, V] float32 logits on the CPU, all −∞ for unreadable contexts, and for each context the leader's tokens
            that the member's most probable tokens map to.
        """
        logits = logits.cpu()
        fresh = torch.tensor([context.fresh for context in contexts])
        projected = self.later(logits, complete=count > 0)
        best = self.later.best(logits, count)
        if self.first is not self.later and fresh.any():
            projected[fresh] = self.first(logits[fresh], complete=count > 0)
            rows = fresh.nonzero().flatten().tolist()
            for row, tokens in zip(rows, self.first.best(logits[fresh], count), strict=True):
                best[row] = tokens
        projected[torch.tensor([context.unreadable for context in contexts])] = float("-inf")
        return projected, [[] if context.unreadable else tokens for context, tokens in zip(contexts, best, strict=True)]
