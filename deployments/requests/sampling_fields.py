"""Sampling fields, in requests and as an endpoint's defaults. Knows nothing of prompts."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from deployments.requests.fields import BadWords, Limit, LogitBias, StopStrings, TokenId, TokenIds
from deployments.validation.strict import StrictModel

_CONVERTED = {"logit_bias", "max_time", "bad_words", "ignore_eos"}  # the other fields have SamplingParams' names


class SamplingFields(StrictModel):
    """Sampling fields, named as in OpenAI's API, vLLM and transformers' `generate`. null means the default."""

    temperature: float | None = Field(None, description="0 is greedy; 1 by default.")
    top_p: float | None = Field(None, description="Nucleus sampling; 1, the default, turns it off.")
    top_k: Annotated[Limit, AfterValidator(lambda value: max(value, 0) if value == -1 else value)] | None = Field(
        None, description="Sample from the k most likely tokens; 0, the default, or -1 turns it off."
    )
    min_p: float | None = Field(
        None, description="Only tokens at least this likely, relative to the likeliest; 0: off."
    )
    typical_p: float | None = Field(None, description="Locally typical sampling (arXiv 2202.00666); 1: off.")
    epsilon_cutoff: float | None = Field(
        None, description="Only tokens at least this likely (arXiv 2210.15191); 0: off."
    )
    eta_cutoff: float | None = Field(
        None, description="The same, with a lower threshold where many are likely; 0: off."
    )
    repetition_penalty: float | None = Field(
        None, description="Above 1: tokens of prompt and answer get less likely (arXiv 1909.05858); 1: off."
    )
    presence_penalty: float | None = Field(
        None, description="Taken off the logits of all tokens of the answer; 0: off."
    )
    frequency_penalty: float | None = Field(None, description="The same, for each time the token appeared; 0: off.")
    no_repeat_ngram_size: Limit | None = Field(None, description="No n-gram of this size appears twice; 0: off.")
    logit_bias: LogitBias | None = Field(None, description="By token id, −100 to 100, what is added to its logit.")
    bad_words: BadWords | None = Field(None, description="Texts that must not appear.")
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        None, description="All other tokens are forbidden."
    )
    suppress_tokens: TokenIds | None = Field(None, description="Forbidden token ids.")
    begin_suppress_tokens: TokenIds | None = Field(None, description="Forbidden as the answer's first token.")
    forced_bos_token_id: TokenId | None = Field(None, description="The answer's first token.")
    forced_eos_token_id: TokenId | None = Field(
        None, description="The last token of an answer that reaches `max_tokens`."
    )
    min_tokens: Limit | None = Field(
        None,
        description="Least tokens of an answer. A stop string counts if it ends after them, wherever it begins.",
    )
    stop: StopStrings | None = Field(None, description="The answer ends right before any of these.")
    stop_token_ids: TokenIds | None = Field(None, description="The answer ends at any of these tokens too.")
    include_stop_str_in_output: bool | None = Field(
        None, description="true: what ended the answer, a stop string or token, is part of it."
    )
    ignore_eos: bool | None = Field(None, description="true: go on after end-of-text tokens, up to `max_tokens`.")
    max_time: float | None = Field(None, description="The answer ends after this many seconds.")

    def with_defaults(self, defaults: "SamplingFields") -> "SamplingFields":
        """These fields, with the defaults' values where they are null."""
        return SamplingFields.model_construct(**{**_given(defaults), **_given(self)})

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of SamplingParams, without `bad_words` and `ignore_eos`, which need the tokenizer."""
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in _given(self).items()
            if name not in _CONVERTED
        }
        if self.logit_bias is not None:
            values["logit_bias"] = tuple(self.logit_bias.items())
        if self.max_time is not None:
            values["max_time_s"] = self.max_time
        return values


def _given(fields: SamplingFields) -> dict[str, Any]:
    values = ((name, getattr(fields, name)) for name in SamplingFields.model_fields)
    return {name: value for name, value in values if value is not None}
