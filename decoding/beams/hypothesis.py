"""What a beam search returns."""

from typing import NamedTuple

from decoding.sampling.stopping import FinishReason


class Hypothesis(NamedTuple):
    """A finished answer, its end token included."""

    tokens: list[int]
    score: float  # log_prob / length ** length_penalty
    log_prob: float
    finish: FinishReason
