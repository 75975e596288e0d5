"""What a member needs to follow a leader that has another tokenizer: see docs/ensembles.md.

Knows nothing of models, messages or caches.
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
class Reading:
    """What a member runs to say what may follow a text."""

    tokens: list[int]  # the member's, of all of the text
    fresh: bool  # whether the next token is the first of a text
    silent: bool = False  # whether the member can't read the text to its end, so that it has nothing to say

    def silenced(self) -> "Reading":
        return Reading(self.tokens, self.fresh, silent=True)


@dataclass(frozen=True, slots=True, eq=False)
class LogitsMapping:
    """Of one pair of tokenizers."""

    leader: Speller
    member: Speller
    begins_texts: bool  # whether the member expects its "bos" token before a text
    copies: bool  # whether both have the same strings, so that what is written in one can be read in the other
    first: Projection  # of what the member says of the first token of a text
    later: Projection  # of all others

    @classmethod
    def build(cls, leader: Speller, member: Speller, *, begins_texts: bool = False) -> "LogitsMapping":
        """begins_texts: the member expects its "bos" token before a text.

        Raises:
            ConfigError: the two have too little in common.
        """
        obstacle = compare_vocabularies(leader.vocabulary, member.vocabulary).blending_obstacle
        if obstacle:
            raise ConfigError(obstacle)
        strings = [{one for one in speller.vocabulary.ids if isinstance(one, bytes)} for speller in (leader, member)]
        copies = strings[0] == strings[1]
        later = first = Projection.build(leader, member)
        if (leader.adds_space or member.adds_space) and not copies:
            first = Projection.build(leader, member, fresh=True)
        return cls(leader, member, begins_texts, copies, first, later)

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether all tokens are in the leader's vocabulary."""
        return not tokens or (min(tokens) >= 0 and max(tokens) < self.leader.vocabulary.size)

    def begin(self, tokens: Sequence[int], prompt_length: int) -> TextAligner | CopiedText:
        """A text of the leader's tokens, the first `prompt_length` of which were there from the beginning.

        These are written as a whole. All others, which the members chose, are appended one by one, as they are when
        drafted: so the member's tokens depend on the text alone, not on how it came about.
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

    def read(self, text: TextAligner | CopiedText) -> Reading:
        """The text as the member runs it. Of a character that is not whole yet, the bytes are written one by one."""
        pending = self.member.spell_bytes(text.pending)
        return Reading([*text.tokens, *(pending or ())], text.fresh, silent=pending is None)

    def say(self, readings: Sequence[Reading], logits: Tensor, count: int) -> tuple[Tensor, list[list[int]]]:
        """What the member thinks of what may follow, in the leader's tokens.

        Args:
            readings: [N] of texts.
            logits: [N, U] after each of them; those of silent ones have no meaning.
            count: how many of the most probable tokens to tell; 0: none, and else what `Projection` calls complete.

        Returns:
            [N, V] float32 on the CPU, −∞ throughout where it has nothing to say, and [N] the leader's tokens to which
            its most probable ones go.
        """
        logits = logits.cpu()
        fresh = torch.tensor([reading.fresh for reading in readings])
        said = self.later(logits, complete=count > 0)
        best = self.later.best(logits, count)
        if self.first is not self.later and fresh.any():
            said[fresh] = self.first(logits[fresh], complete=count > 0)
            for at, found in zip(
                fresh.nonzero().flatten().tolist(), self.first.best(logits[fresh], count), strict=True
            ):
                best[at] = found
        said[torch.tensor([reading.silent for reading in readings])] = float("-inf")
        return said, [[] if reading.silent else found for reading, found in zip(readings, best, strict=True)]
