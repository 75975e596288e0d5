"""Maps a target's tokens and parameters to a drafter with another tokenizer: see docs/other-tokenizers.md."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from decoding.tokenizers.text_aligner import Speller, TextAligner
from decoding.tokenizers.vocabulary import compare_vocabularies, counterparts


@dataclass(frozen=True, slots=True, eq=False)
class DraftMapping:
    """The mapping of one pair of tokenizers. Drafts are hints, so parameters without a translation are left out."""

    target: Speller
    drafter: Speller
    begins_texts: bool  # whether the drafter expects its "bos" token before a text
    ids: Mapping[int, int]  # the target's token to the drafter's token of the same string
    noise_ids: Tensor  # [V] int32: the token whose noise each of the drafter's tokens gets
    impossible: Tensor  # [V] bool: the drafter's tokens that the target can't write

    @classmethod
    def build(cls, target: Speller, drafter: Speller, *, begins_texts: bool = False) -> "DraftMapping":
        """begins_texts: the drafter expects its "bos" token before a text.

        Raises ConfigError if the pair does not allow drafts through text.
        """
        obstacle = compare_vocabularies(target.vocabulary, drafter.vocabulary).drafting_obstacle
        if obstacle:
            raise ConfigError(obstacle)
        ids = counterparts(drafter.vocabulary, target.vocabulary)
        same = torch.tensor(ids)  # [V]
        own = torch.arange(target.vocabulary.size, target.vocabulary.size + len(same))
        pairs = ((target_id, drafter_id) for drafter_id, target_id in enumerate(ids) if target_id >= 0)
        return cls(
            target,
            drafter,
            begins_texts,
            dict(pairs),
            torch.where(same < 0, own, same).int(),
            torch.tensor([not _is_possible(meaning, target) for meaning in drafter.vocabulary.meanings]),
        )

    def to(self, device: torch.device | str) -> "DraftMapping":
        return replace(self, noise_ids=self.noise_ids.to(device), impossible=self.impossible.to(device))

    def can_map(self, tokens: Sequence[int]) -> bool:
        """Whether the text is not empty and has only tokens of the target's vocabulary."""
        return len(tokens) > 0 and min(tokens) >= 0 and max(tokens) < self.target.vocabulary.size

    def aligner(self, tokens: Sequence[int]) -> TextAligner:
        """Return an aligner for a text that begins with these target tokens. They are yet to be committed."""
        return TextAligner.for_text(self.target, self.drafter, tokens, begins_texts=self.begins_texts)

    def params(self, params: SamplingParams, max_tokens: int) -> SamplingParams:
        """Translate a request's parameters to the drafter's tokens.

        Under rejection sampling the drafter is greedy: the target then treats a draft as a guess, not as a sample.

        params: in the target's tokens.
        max_tokens: in the drafter's tokens.
        """
        words = (word for word in params.bad_words_ids if all(token in self.ids for token in word))
        return replace(
            params,
            logit_bias=tuple((self.ids[token], bias) for token, bias in params.logit_bias if token in self.ids),
            bad_words_ids=tuple(self._map_tokens(word) for word in words),
            allowed_token_ids=self._map_tokens(params.allowed_token_ids),
            forced_bos_token_id=self._map_token(params.forced_bos_token_id),
            forced_eos_token_id=self._map_token(params.forced_eos_token_id),
            suppress_tokens=self._map_tokens(params.suppress_tokens),
            begin_suppress_tokens=self._map_tokens(params.begin_suppress_tokens),
            eos_token_ids=self._map_tokens(params.eos_token_ids),
            stop_token_ids=self._map_tokens(params.stop_token_ids),
            structure=None,
            temperature=0.0 if params.rejects else params.temperature,
            verification="coupled",
            max_tokens=max(max_tokens, params.min_tokens),
        )

    def _map_token(self, token: int | None) -> int | None:
        return None if token is None else self.ids.get(token)

    def _map_tokens(self, tokens: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.ids[token] for token in tokens if token in self.ids)


def _is_possible(meaning: bytes | str | None, target: Speller) -> bool:
    if isinstance(meaning, bytes):
        return target.vocabulary.can_spell(meaning)
    return meaning in target.vocabulary.ids
