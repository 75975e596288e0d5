"""Beam search options of a request, named as in transformers' `generate`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from decoding.errors import require

MAX_BEAMS = 128
_MAX_LENGTH_PENALTY = 50  # powers of any length are then finite
_MAX_DIVERSITY_PENALTY = 1e6

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """Options of one search. Raises InvalidRequestError if a value is out of range; the error names the field."""

    num_beams: int
    num_return_sequences: int = 1
    length_penalty: float = 1.0  # score = log-probability / length ** length_penalty
    # When to stop once there are as many finished answers as beams: True: at once; False: when live beams can't improve
    # at their present length; "never": when they can't improve at any length.
    early_stopping: EarlyStopping = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0  # subtracted for each beam of an earlier group that chose the token
    force_words_ids: tuple[tuple[tuple[int, ...], ...], ...] = ()  # phrases of each word, of which one must appear

    def __post_init__(self) -> None:
        beams, groups, penalty = self.num_beams, self.num_beam_groups, self.diversity_penalty
        most, longest = _MAX_DIVERSITY_PENALTY, _MAX_LENGTH_PENALTY
        alike = "above 0, or num_beam_groups 1: equal groups find the same"
        for field, holds, expected in (
            ("num_beams", 1 <= beams <= MAX_BEAMS, f"from 1 to {MAX_BEAMS}"),
            ("num_return_sequences", 1 <= self.num_return_sequences <= beams, f"from 1 to num_beams, {beams}"),
            ("length_penalty", abs(self.length_penalty) <= longest, f"from -{longest} to {longest}"),
            ("num_beam_groups", groups >= 1 and beams % groups == 0, f"a divisor of num_beams, {beams}"),
            ("diversity_penalty", 0 <= penalty <= most, f"from 0 to {most}"),
            ("diversity_penalty", groups == 1 or penalty != 0, alike),
        ):
            require(holds, field, getattr(self, field), expected)
        words = self.force_words_ids
        require(all(word and all(word) for word in words), "force_words", words, "phrases that are not empty")

    def check(self, *, max_tokens: int, end_token_ids: tuple[int, ...]) -> None:
        """Check that an answer can contain all forced words.

        Raises InvalidRequestError if max_tokens is too small, or a word contains an end token.
        """
        needed = sum(min(map(len, word)) for word in self.force_words_ids)
        problem = f"{self.force_words_ids!r}, {needed} tokens in all"
        require(needed <= max_tokens, "force_words", problem, f"at most max_tokens, {max_tokens}")
        ends = sorted(set(end_token_ids).intersection(self.named_tokens()))
        require(not ends, "force_words", ends, "without tokens that end the answer")

    def named_tokens(self) -> Iterator[int]:
        """Yield every token id in the options, to be checked against a vocabulary."""
        return (token for word in self.force_words_ids for phrase in word for token in phrase)
