"""Bounds of a request: answers, lengths, reported tokens, tokens left to choose, structures that can be followed."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedTokenizerBase

from actors.coordinator.request import Request
from decoding.errors import ConfigError, ContextLengthError, InvalidRequestError
from decoding.grammars.grammar import GrammarCompiler
from decoding.sampling.params import SamplingParams, Structure
from deployments.fields.generation import GenerationRequest
from engine.loading.tokenizers import structure_tokenizer


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long the answers of an endpoint may be, and how much of their tokens they may report."""

    context_length: int  # tokens, prompt and answer together
    default_max_tokens: int | None = None  # of an answer, where neither the client nor the API names a number
    max_logprobs: int = 20  # most probable tokens per position
    total: int = 500_000  # reported over all positions of answers and prompts; the details of a token count as one

    def answer_tokens(
        self, body: GenerationRequest, lengths: Sequence[int], longest: Sequence[tuple[int, str]]
    ) -> list[int]:
        """Most tokens of the answers to each prompt: the client's limit, or the default within the context.

        Raises InvalidRequestError if a prompt is empty or too long, or too many tokens are to be reported.

        lengths: tokens of each prompt without those that compression left out.
        longest: with them, and the field, of each prompt or of a longer one in its formula.
        """
        most = self._reportable(body, lengths)
        return [self._answer_tokens(length, field, body, most) for length, field in longest]

    def _answer_tokens(self, length: int, field: str, body: GenerationRequest, most: int | None) -> int:
        wanted = body.wanted_max_tokens
        room = self.context_length - length
        if not length:
            raise InvalidRequestError(f"{field}: should have at least one token.", field=field)
        if room < 1:
            raise ContextLengthError(
                f"{field}: has {length} tokens, but should have 1 to {self.context_length - 1}.", field=field
            )
        if wanted is None:
            return min(body.default_max_tokens or self.default_max_tokens or room, room, most or room)
        if body.limit_is_upper_bound:
            return min(wanted, room, most or room)
        if wanted > room:
            raise ContextLengthError(
                f"{field} and max_tokens: {length} + {wanted} tokens don't fit into the context of "
                f"{self.context_length}; set max_tokens to {room} or less, or shorten {field}.",
                field="max_tokens",
            )
        return 1 if body.prompt_only else wanted  # a prompt's log-probabilities come with the first token

    def _reportable(self, body: GenerationRequest, lengths: Sequence[int]) -> int | None:
        """Most tokens of each answer that may be reported; None: any."""
        for field, count in ((body.logprobs_field, body.logprob_count), ("prompt_logprobs", body.prompt_logprob_count)):
            if (count or 0) > self.max_logprobs:
                reason = f"{field}: should be at most {self.max_logprobs} (http.max_logprobs), not {count}."
                raise InvalidRequestError(reason, field=field)
        per_prompt_token = _tokens_per_position(body.prompt_logprob_count, details=body.echoes)
        in_prompts = body.choices * sum(lengths) * per_prompt_token
        if in_prompts > self.total:
            raise self._too_many("prompt_logprobs", in_prompts)
        per_token = _tokens_per_position(body.logprob_count, details=bool(body.return_token_details))
        if per_token == 0:
            return None
        most = (self.total - in_prompts) // (per_token * body.choices * len(lengths))
        if most < 1 or (not body.limit_is_upper_bound and most < (body.wanted_max_tokens or 0)):
            tokens = body.choices * len(lengths) * max(1, body.wanted_max_tokens or 0)
            raise self._too_many(body.logprobs_field, in_prompts + tokens * per_token, most)
        return most

    def _too_many(self, field: str, count: int, max_tokens: int = 0) -> InvalidRequestError:
        way = f"set max_tokens to {max_tokens} or less" if max_tokens > 0 else "ask for fewer answers"
        reason = (
            f"{field}: in all positions of all answers and prompts, up to {count} tokens would be reported; at most "
            f"{self.total} are allowed. Ask for fewer, or {way}."
        )
        return InvalidRequestError(reason, field=field)


def check_count(body: GenerationRequest, requests_per_answer: int, most: int) -> None:
    """Raise InvalidRequestError if a body asks for more than `most` requests to models at once."""
    count = body.prompt_count * body.choices * requests_per_answer
    if count > most:
        field, what = ("prompt", "prompts") if body.choices == 1 else ("n", "answers")
        raise InvalidRequestError(
            f"{field}: {count} {what} are too many; at most {most} are taken at once.", field=field
        )


def count_reported_tokens(body: GenerationRequest, requests: Sequence[Request]) -> int:
    """Most tokens that the answers report, echoed prompts included."""
    per_token = _tokens_per_position(body.logprob_count, details=bool(body.return_token_details))
    per_prompt_token = _tokens_per_position(body.prompt_logprob_count, details=body.echoes)
    return sum(len(request.prompt) * per_prompt_token + request.params.max_tokens * per_token for request in requests)


def _tokens_per_position(count: int | None, *, details: bool) -> int:
    return (0 if count is None else count + 1) + details


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


class StructureChecker:
    """Checker of one endpoint. Its compiler takes up to a second to build, so it is built on first use."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...]) -> None:
        self._compiler = cache(lambda: GrammarCompiler(structure_tokenizer(tokenizer, eos_token_ids)))

    async def check(self, structure: Structure, *, field: str) -> None:
        """Raise InvalidRequestError, naming the field, if the structure is invalid or the model can't follow it."""
        try:
            compiler = await asyncio.to_thread(self._compiler)
            await asyncio.shield(asyncio.wrap_future(compiler.start(structure)))  # requests share it
        except InvalidRequestError as error:
            inner = error.field or ""
            outer = inner if inner.startswith(field) else field
            raise InvalidRequestError(f"{outer}{str(error).removeprefix(inner)}", field=outer) from error
        except ConfigError as error:
            raise InvalidRequestError(f"{field}: {error}", field=field) from error
