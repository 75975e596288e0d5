"""Whether a request's rules leave any token to choose: what can never be answered is refused at once."""

from decoding.errors import InvalidRequestError
from decoding.params import SamplingParams


def check_feasible(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError if all tokens of some place in the answer are forbidden."""
    allowed = set(params.allowed_token_ids) or set(range(vocab_size))
    allowed -= set(params.suppress_tokens)
    allowed -= {word[0] for word in params.bad_words_ids if len(word) == 1}
    if not allowed:
        _refuse("allowed_token_ids" if params.allowed_token_ids else "suppress_tokens", "leave no token to choose")
    if params.forced_bos_token_id is None and not allowed - set(params.begin_suppress_tokens):
        _refuse("begin_suppress_tokens", "leaves no token for the answer to begin with")
    if params.min_tokens > 0 and not allowed - set(params.end_token_ids):
        _refuse("min_tokens", "is above 0, but only tokens that end the answer are left to choose")


def _refuse(field: str, problem: str) -> None:
    raise InvalidRequestError(f"{field} {problem}.", field=field)
