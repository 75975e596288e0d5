"""What a drafter needs to draft for a target that has another tokenizer: see docs/other-tokenizers.md.

Knows nothing of models, messages or caches.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from decoding.tokenizers.alignment import compare_vocabularies, counterparts
from decoding.tokenizers.text_aligner import Speller, TextAligner


@dataclass(frozen=True, slots=True, eq=False)
class DraftMapping:
    """Of one pair of tokenizers. Drafts are hints, so what has no translation is left out."""

    target: Speller
    drafter: Speller
    begins_texts: bool  # whether the drafter expects its "bos" token before a text
    ids: Mapping[int, int]  # the drafter's tokens of the same string, by the target's
    noise_ids: Tensor  # [V] int32: by which each of the drafter's tokens draws its noise
    impossible: Tensor  # [V] bool: the drafter's tokens that the target can't write

    @classmethod
    def build(cls, target: Speller, drafter: Speller, *, begins_texts: bool = False) -> "DraftMapping":
        """begins_texts: the drafter expects its "bos" token before a text.

        Raises:
            ConfigError: no drafts can come through text.
        """
        obstacle = compare_vocabularies(target.vocabulary, drafter.vocabulary).drafting_obstacle
        if obstacle:
            raise ConfigError(obstacle)
        theirs = counterparts(drafter.vocabulary, target.vocabulary)  # [V]
        own = torch.arange(target.vocabulary.size, target.vocabulary.size + len(theirs))
        pairs = ((there, here) for here, there in enumerate(theirs.tolist()) if there >= 0)
        return cls(
            target,
            drafter,
            begins_texts,
            dict(pairs),
            torch.where(theirs < 0, own, theirs).int(),
            torch.tensor([not _is_possible(meaning, target) for meaning in drafter.vocabulary.meanings]),
        )

    def to(self, device: torch.device | str) -> "DraftMapping":
        return replace(self, noise_ids=self.noise_ids.to(device), impossible=self.impossible.to(device))

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether there are tokens, all of them in the target's vocabulary."""
        return len(tokens) > 0 and min(tokens) >= 0 and max(tokens) < self.target.vocabulary.size

    def aligner(self, tokens: Sequence[int]) -> TextAligner:
        """Of a text that begins with these tokens of the target, which are yet to be committed."""
        return TextAligner.for_text(self.target, self.drafter, tokens, begins_texts=self.begins_texts)

    def params(self, given: SamplingParams, max_tokens: int) -> SamplingParams:
        """What of a request's parameters means something to the drafter, in its own tokens.

        Under rejection sampling it drafts greedily: the target then takes a draft for what it is, a guess, not a draw.

        Args:
            given: by the client, in the target's tokens.
            max_tokens: of the drafter's.
        """
        words = (word for word in given.bad_words_ids if all(token in self.ids for token in word))
        return replace(
            given,
            logit_bias=tuple((self.ids[token], bias) for token, bias in given.logit_bias if token in self.ids),
            bad_words_ids=tuple(self._all(word) for word in words),
            allowed_token_ids=self._all(given.allowed_token_ids),
            forced_bos_token_id=self._one(given.forced_bos_token_id),
            forced_eos_token_id=self._one(given.forced_eos_token_id),
            suppress_tokens=self._all(given.suppress_tokens),
            begin_suppress_tokens=self._all(given.begin_suppress_tokens),
            eos_token_ids=self._all(given.eos_token_ids),
            stop_token_ids=self._all(given.stop_token_ids),
            structure=None,
            temperature=0.0 if given.rejects else given.temperature,
            verification="coupled",
            max_tokens=max(max_tokens, given.min_tokens),
        )

    def _one(self, token: int | None) -> int | None:
        return None if token is None else self.ids.get(token)

    def _all(self, tokens: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.ids[token] for token in tokens if token in self.ids)


def _is_possible(meaning: bytes | str | None, target: Speller) -> bool:
    if isinstance(meaning, bytes):
        return target.vocabulary.can_spell(meaning)
    return meaning in target.vocabulary.ids
