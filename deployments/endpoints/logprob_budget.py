"""How many log-probabilities a request may ask for: what is told of a token costs the server time and memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.coordinator.request import Request
from decoding.errors import InvalidRequestError
from deployments.requests.schema import GenerationRequest


@dataclass(frozen=True, slots=True)
class LogprobBudget:
    """Of each request."""

    max_logprobs: int = 20  # most probable tokens told in each position
    total: int = 500_000  # in all positions of all answers and their prompts; details of a token count as one

    def answer_tokens(self, body: GenerationRequest, prompts: Sequence[Sequence[int]]) -> int | None:
        """How many tokens each answer may have by this budget; None: any.

        Raises:
            InvalidRequestError: too many are asked for in each position, or for the prompts alone.
        """
        for field, count in ((body.logprobs_field, body.logprob_count), ("prompt_logprobs", body.prompt_logprob_count)):
            if (count or 0) > self.max_logprobs:
                reason = f"{field}: should be at most {self.max_logprobs} (http.max_logprobs), not {count}."
                raise InvalidRequestError(reason, field=field)
        of_prompts = body.choices * sum(map(len, prompts)) * _told(body.prompt_logprob_count, details=body.echoes)
        if of_prompts > self.total:
            raise self._too_many("prompt_logprobs", of_prompts)
        of_a_token = _told(body.logprob_count, details=bool(body.return_token_details))
        if of_a_token == 0:
            return None
        most = (self.total - of_prompts) // (of_a_token * body.choices * len(prompts))
        if most < 1 or (not body.takes_less and most < (body.wanted_max_tokens or 0)):
            tokens = body.choices * len(prompts) * max(1, body.wanted_max_tokens or 0)
            raise self._too_many(body.logprobs_field, of_prompts + tokens * of_a_token, most)
        return most

    def _too_many(self, field: str, count: int, max_tokens: int = 0) -> InvalidRequestError:
        way = f"set max_tokens to {max_tokens} or less" if max_tokens > 0 else "ask for fewer answers"
        reason = (
            f"{field}: in all positions of all answers and prompts, up to {count} tokens would be told of; at most "
            f"{self.total} are allowed (http.max_logprobs_per_request). Ask for fewer, or {way}."
        )
        return InvalidRequestError(reason, field=field)


def tokens_told(body: GenerationRequest, requests: Sequence[Request]) -> int:
    """Of how many tokens the answers tell at most, those of an echoed prompt included."""
    of_a_token = _told(body.logprob_count, details=bool(body.return_token_details))
    of_prompts = _told(body.prompt_logprob_count, details=body.echoes)
    return sum(len(one.prompt) * of_prompts + one.params.max_tokens * of_a_token for one in requests)


def _told(count: int | None, *, details: bool) -> int:
    """Of how many tokens the answer tells in a position."""
    return (0 if count is None else count + 1) + details
