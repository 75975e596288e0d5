"""What is reported of a token's probability."""

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of a token, given the tokens before it.

    A long prompt has very many, which the garbage collector needs not look through.
    """

    token: int
    logprob: float
    rank: int  # 1: the most probable
    top: tuple[tuple[int, float], ...]  # the most probable tokens and their log-probabilities, best first
