"""Parameters of requests. Must not know how they are checked: the HTTP interface's own bodies do that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How answers are sampled, where they end, and what is reported; fields of /v1/completions (docs/http.md).

    None is the default: the endpoint's, or else the interface's. Values are checked when a request is made.
    """

    max_tokens: int | None = None  # 16 for texts; as many as fit for conversations
    seed: int | None = None  # same seed, same text; None: drawn
    n: int | None = None  # answers per prompt
    best_of: int | None = None  # make so many, return the `n` most probable
    temperature: float | None = None  # 0: greedy; 1 by default
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[int, float] | None = None  # by token id
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_time: float | None = None  # seconds, after which the answer ends
    timeout_s: float | None = None  # seconds, after which the request fails
    logprobs: int | None = None  # most probable tokens to report per position of the answer
    prompt_logprobs: int | None = None  # the same for the prompt
    response_format: Mapping[str, Any] | None = None  # OpenAI's: JSON, or a JSON schema
    structured_outputs: Mapping[str, Any] | None = None  # vLLM's: json, regex, choice or grammar
    return_token_details: bool | None = None  # ids, texts and sources of tokens, in `Answer.document`
    use_beam_search: bool | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    force_words: Sequence[str | Sequence[str]] | None = None
    weights: Sequence[float] | None = None  # of an ensemble's members
    blend: Mapping[str, Any] | None = None  # how they are blended
    speculate: bool | None = None  # False: plain decoding. Same text
    draft_length: int | None = None  # most draft tokens that a step verifies. Same text
    proposers: Sequence[str] | None = None  # that may draft. Same text
    verification: Literal["coupled", "rejection"] | None = None
    cache_salt: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON has them."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: _as_json(value) for name, value in given if value is not None}


def _as_json(value: object) -> object:
    match value:
        case Mapping():
            return {key: _as_json(entry) for key, entry in value.items()}
        case str() | bytes():
            return value
        case Sequence():
            return [_as_json(entry) for entry in value]
        case _:
            return value
