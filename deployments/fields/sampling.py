"""Fields of sampling, in requests and as an endpoint's defaults, and of beam search."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from decoding.beams.options import MAX_BEAMS, BeamOptions
from decoding.sampling.params import MIN_TEMPERATURE
from deployments.fields.strict import StrictModel
from deployments.fields.types import BadWords, Items, Limit, LogitBias, StopStrings, TokenId, TokenIds, Words, as_list

_CONVERTED = {"logit_bias", "max_time", "bad_words", "ignore_eos"}  # the other fields have SamplingParams' names
TOKEN_ID_FIELDS = (
    "logit_bias",
    "allowed_token_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "stop_token_ids",
)
_DEFAULT_BEAMS = 4
_MAX_ALTERNATIVES = 32


class SamplingFields(StrictModel):
    """Sampling fields, named as in OpenAI's API, vLLM and transformers' `generate`. null means the default."""

    temperature: (
        Annotated[float, AfterValidator(lambda value: max(value, MIN_TEMPERATURE) if value > 0 else value)] | None
    ) = Field(None, description=f"0 is greedy; 1 by default. Between 0 and {MIN_TEMPERATURE} it is {MIN_TEMPERATURE}.")
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
        None, description="Least tokens of an answer. A stop string counts if it ends after them, wherever it begins."
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


Alternatives = Annotated[Items[Words], Field(min_length=1, max_length=_MAX_ALTERNATIVES), BeforeValidator(as_list)]


class BeamFields(StrictModel):
    """Fields of beam search, named as in vLLM's API and transformers' `generate`."""

    use_beam_search: bool | None = Field(
        None, description="true: search for the `n` most probable answers; deterministic without `temperature`."
    )
    num_beams: Annotated[int, Field(ge=1, le=MAX_BEAMS)] | None = Field(
        None, description="Beams of the search; by default `best_of` or `n`, or 4. More than one make a search."
    )
    length_penalty: float | None = Field(
        None, description="Answers are compared by log-probability / length to this power; 1 by default."
    )
    early_stopping: Literal[True, False, "never"] | None = Field(
        None, description='When as many answers as beams are there: true, false or `"never"`, as transformers has it.'
    )
    num_beam_groups: Annotated[int, Field(ge=1, le=MAX_BEAMS)] | None = Field(
        None, description="Groups of beams that avoid each other's tokens (arXiv 1610.02424); 1 by default."
    )
    diversity_penalty: float | None = Field(None, description="How strongly they avoid them; needs `num_beam_groups`.")
    force_words: Annotated[list[Alternatives], Field(max_length=64)] | None = Field(
        None, description="Texts that every answer of a search must have; for a list of texts, one of them."
    )

    @property
    def searches(self) -> bool:
        return self.use_beam_search is True or (self.num_beams or 1) > 1

    def beams(
        self, *, choices: int, best_of: int | None, force_words_ids: tuple[tuple[tuple[int, ...], ...], ...]
    ) -> BeamOptions:
        """Build the decoder's options; raises InvalidRequestError if one is out of range."""
        names = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
        options: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        answers = max(choices, best_of or 1)
        return BeamOptions(
            num_beams=self.num_beams or (answers if answers > 1 else _DEFAULT_BEAMS),
            num_return_sequences=choices,
            force_words_ids=force_words_ids,
            **options,
        )

    def beam_conditions(self) -> Iterator[tuple[bool, str, str]]:
        """Conditions on the fields: whether each holds, the field that is wrong if not, and the problem."""
        yield (self.use_beam_search is not False or not self.searches, "num_beams", "above 1 needs use_beam_search")
        if not self.searches:
            yield (self.length_penalty in (None, 1), "length_penalty", "needs use_beam_search: true")
            yield (not self.early_stopping, "early_stopping", "needs use_beam_search: true")
            yield (self.num_beam_groups in (None, 1), "num_beam_groups", "needs use_beam_search: true")
            yield (not self.diversity_penalty, "diversity_penalty", "needs use_beam_search: true")
            yield (not self.force_words, "force_words", "needs use_beam_search: true")
