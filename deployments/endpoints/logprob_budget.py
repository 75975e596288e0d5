"""Bounds the log-probabilities and token details of a request, which cost time and memory. Knows no models."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.coordinator.request import Request
from decoding.errors import InvalidRequestError
from deployments.requests.generation_request import GenerationRequest


@dataclass(frozen=True, slots=True)
class LogprobBudget:
    """Bounds for each request."""

    max_logprobs: int = 20  # most probable tokens per position
    total: int = 500_000  # over all positions of answers and prompts; the details of a token count as one

    def answer_tokens(self, body: GenerationRequest, prompts: Sequence[Sequence[int]]) -> int | None:
        """Most tokens of each answer within this budget; None: any.

        Raises:
            InvalidRequestError: too many are asked for in each position, or for the prompts alone.
        """
        for field, count in ((body.logprobs_field, body.logprob_count), ("prompt_logprobs", body.prompt_logprob_count)):
            if (count or 0) > self.max_logprobs:
                reason = f"{field}: should be at most {self.max_logprobs} (http.max_logprobs), not {count}."
                raise InvalidRequestError(reason, field=field)
        in_prompts = (
            body.choices * sum(map(len, prompts)) * _tokens_per_position(body.prompt_logprob_count, details=body.echoes)
        )
        if in_prompts > self.total:
            raise self._too_many("prompt_logprobs", in_prompts)
        per_token = _tokens_per_position(body.logprob_count, details=bool(body.return_token_details))
        if per_token == 0:
            return None
        most = (self.total - in_prompts) // (per_token * body.choices * len(prompts))
        if most < 1 or (not body.limit_is_upper_bound and most < (body.wanted_max_tokens or 0)):
            tokens = body.choices * len(prompts) * max(1, body.wanted_max_tokens or 0)
            raise self._too_many(body.logprobs_field, in_prompts + tokens * per_token, most)
        return most

    def _too_many(self, field: str, count: int, max_tokens: int = 0) -> InvalidRequestError:
        way = f"set max_tokens to {max_tokens} or less" if max_tokens > 0 else "ask for fewer answers"
        reason = (
            f"{field}: in all positions of all answers and prompts, up to {count} tokens would be reported; at most "
            f"{self.total} are allowed. Ask for fewer, or {way}."
        )
        return InvalidRequestError(reason, field=field)


def count_reported_tokens(body: GenerationRequest, requests: Sequence[Request]) -> int:
    """Most tokens that the answers report, echoed prompts included."""
    per_token = _tokens_per_position(body.logprob_count, details=bool(body.return_token_details))
    per_prompt_token = _tokens_per_position(body.prompt_logprob_count, details=body.echoes)
    return sum(len(request.prompt) * per_prompt_token + request.params.max_tokens * per_token for request in requests)


def _tokens_per_position(count: int | None, *, details: bool) -> int:
    """Number of tokens that the answer reports per position."""
    return (0 if count is None else count + 1) + details
