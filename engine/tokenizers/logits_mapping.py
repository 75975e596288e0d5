"""Maps a member's logits to the tokens of a leader with another tokenizer: see docs/ensembles.md.

It knows nothing of models, messages or caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.errors import ConfigError
from decoding.tokenizers.alignment import compare_vocabularies
from decoding.tokenizers.copied_text import CopiedText
from decoding.tokenizers.projection import Projection
from decoding.tokenizers.text_aligner import Speller, TextAligner


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

        Raises:
            ConfigError: the two have too little in common.
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
