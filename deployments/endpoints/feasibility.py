"""Refuses requests whose parameters forbid every token. Looks only at named tokens, never at the whole vocabulary."""

from collections.abc import Collection

from decoding.errors import InvalidRequestError
from decoding.sampling.params import SamplingParams


def check_feasible(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError if at some position of the answer all tokens are forbidden."""
    allowed = params.allowed_token_ids
    forbidden = {*params.suppress_tokens, *(word[0] for word in params.bad_words_ids if len(word) == 1)}
    if not _leaves_any(allowed, forbidden, vocab_size):
        _refuse("allowed_token_ids" if allowed else "suppress_tokens", "leave no token to choose")
    first_forbidden = params.begin_suppress_tokens if params.forced_bos_token_id is None else ()
    if first_forbidden and not _leaves_any(allowed, forbidden.union(first_forbidden), vocab_size):
        _refuse("begin_suppress_tokens", "leaves no token for the answer to begin with")
    if params.min_tokens > 0 and not _leaves_any(allowed, forbidden.union(params.end_token_ids), vocab_size):
        _refuse("min_tokens", "is above 0, but only tokens that end the answer are left to choose")


def _leaves_any(allowed: Collection[int], forbidden: Collection[int], vocab_size: int) -> bool:
    """Whether any token is allowed and not forbidden. allowed: empty means the whole vocabulary."""
    if allowed:
        return any(token not in forbidden for token in allowed)
    return len(forbidden) < vocab_size or sum(0 <= token < vocab_size for token in forbidden) < vocab_size


def _refuse(field: str, problem: str) -> None:
    raise InvalidRequestError(f"{field} {problem}.", field=field)
