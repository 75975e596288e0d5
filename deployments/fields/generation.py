"""The fields that every request for text has. Each known field works or is refused with a reason."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from decoding.beams.options import MAX_BEAMS
from decoding.drafts.draft import LONGEST_DRAFT, ProposerName
from decoding.sampling.params import MAX_LOGPROBS, SamplingParams, Structure, Verification
from deployments.fields.conversation import Conversation, ToolUse
from deployments.fields.ensembles import EnsembleFields
from deployments.fields.formulas import FormulaRequestFields
from deployments.fields.prompts import Compressed
from deployments.fields.sampling import BeamFields, SamplingFields
from deployments.fields.strict import IgnoredFields, StrictModel, Text, wrong_field
from deployments.fields.structures import ResponseFormat, StructuredOutputs, with_structured_outputs
from deployments.fields.types import (
    JSON_TEXTS,
    MIN_TIMEOUT_S,
    EndpointName,
    JsonObject,
    Limit,
    at_most,
    only,
    without_effect,
)

_MOST_METADATA = 64  # entries; OpenAI takes 16
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {  # by name: values that change nothing, what to send instead
    "max_new_tokens": ((), "send max_tokens"),
    "min_new_tokens": ((0,), "send min_tokens"),
    "n_predict": ((-1,), "send max_tokens"),
    "truncate_prompt_tokens": ((-1,), "send a prompt that fits"),
    "stop_regex": (([], ""), "send stop"),
    "logits_processors": (([],), "send logit_bias, bad_words or structured_outputs"),
    "custom_logit_processor": ((), "send logit_bias, bad_words or structured_outputs"),
    "chat_template": ((), "put it into the checkpoint"),
    "documents": (([],), "put them into a message"),
    "prompt_embeds": (([],), "send a prompt"),
    "input_embeds": (([],), "send a prompt"),
    "lora": (([],), "send an adapter's name as the model"),
    "lora_path": ((), "send an adapter's name as the model"),
    "structural_tag": ((), "send structured_outputs"),
    "guided_json_object": ((False,), 'send response_format: {"type": "json_object"}'),
    "guided_whitespace_pattern": ((), "blanks can't be chosen"),
}
_MAX_CHOICES = 128
_SEED_BITS = 53  # a drawn seed survives JSON readers that know only doubles
_LONGEST_SALT = 200  # characters
_DRAW_SEED = -1  # as in llama.cpp and vLLM
_NO_DEFAULTS = SamplingFields()
Choices = Annotated[int, Field(ge=1, le=_MAX_CHOICES)]
_WithoutSpecialTokens = Annotated[
    bool, only(True, why="texts have no special tokens; `return_token_details` shows them")
]


class CompatibilityFields(StrictModel):
    """Fields without effect in completions and chat."""

    user: Annotated[Any, JSON_TEXTS] = Field(None, description="Accepted for compatibility, and not used.")
    metadata: Annotated[JsonObject, at_most(_MOST_METADATA)] | None = Field(None, description="The same.")
    safety_identifier: str | None = Field(None, description="The same.")
    prompt_cache_key: str | None = Field(None, description="The same.")
    service_tier: str | None = Field(None, description="The same.")
    store: Annotated[Any, without_effect(False)] = Field(None, description="Without effect: answers are not stored.")
    skip_special_tokens: _WithoutSpecialTokens | None = Field(None, description="Only true.")
    spaces_between_special_tokens: _WithoutSpecialTokens | None = Field(None, description="Only true.")


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="End the stream with a chunk that has `usage`.")


class GenerationRequest(SamplingFields, BeamFields, EnsembleFields, FormulaRequestFields, CompatibilityFields):
    """Fields that completions, chat, responses and messages share. null means the default."""

    prompt_field: ClassVar[str]
    logprobs_field: ClassVar[str] = "top_logprobs"
    default_max_tokens: ClassVar[int | None]  # None: as many as fit into the context

    model: EndpointName = ""
    max_tokens: Limit | None = Field(None, description="Most tokens to answer with.")
    seed: int | None = Field(None, description="Same seed, same text; drawn if missing or -1, and returned either way.")
    strict: bool | None = Field(None, description="true: refuse unknown fields instead of ignoring them.")
    n: Choices | None = Field(None, description="Answers per prompt; 1 by default.")
    best_of: Choices | None = Field(
        None, description="Make this many answers per prompt; return the `n` with the highest mean log-probability."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Report the prompt's tokens and this many most probable ones per position."
    )
    response_format: ResponseFormat | None = Field(None, description="`text`, `json_object` or a `json_schema`.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Structure of the answer: `json` (a schema), `regex`, `choice` (of texts) or `grammar`."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Without effect where nothing is streamed.")
    speculate: bool | None = Field(None, description="false: plain decoding, without drafts. Same text.")
    draft_length: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)] | None = Field(
        None, description="Most draft tokens that one step verifies, instead of the endpoint's. Same text."
    )
    proposers: list[ProposerName] | None = Field(
        None,
        description="Which of the endpoint's proposers may draft: `drafter`, `ngram`, `corpus`, `medusa`, `eagle3`, "
        "`mtp`, `dflash`, `pard`, `self`. Same text.",
    )
    verification: Verification | None = Field(
        None, description="How drafts are verified, `coupled` or `rejection`, instead of as the endpoint does it."
    )
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = Field(
        None, description="Among waiting requests of the same API key, lower ones begin first; 0 by default."
    )
    timeout_s: Annotated[float, Field(ge=MIN_TIMEOUT_S)] | None = Field(
        None, description="Seconds after which the request fails with 408, instead of the endpoint's; 0.001 or more."
    )
    cache_salt: Annotated[Text, Field(min_length=1, max_length=_LONGEST_SALT)] | None = Field(
        None, description="Cached prompts and answers are shared only with requests of the same salt."
    )
    return_token_details: bool | None = Field(
        None, description="Every choice has `token_details`: each token's id, text and where it came from."
    )

    _compressed: Compressed | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _fields_of_other_servers(cls, data: object, info: ValidationInfo) -> object:
        """Refuse those that would change the answer. What only tunes other servers, or streams, is ignored."""
        if not isinstance(data, dict):
            return data
        if isinstance(info.context, IgnoredFields) and data.get("stream_options") and not data.get("stream"):
            info.context.note("stream_options")
            data = {**data, "stream_options": None}
        for name, (harmless, advice) in _REFUSED.items():
            unknown = name not in cls.model_fields
            if unknown and data.get(name) is not None and not any(data[name] == value for value in harmless):
                raise wrong_field(name, f"is not supported and would change the answer; {advice}")
        return with_structured_outputs(data)

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "GenerationRequest":
        for holds, field, problem in self._conditions():
            if not holds:
                raise wrong_field(field, problem)
        return self

    def _conditions(self) -> list[tuple[bool, str, str]]:
        """Conditions on the fields: whether each holds, the field that is wrong if not, and the problem."""
        structured = self.structure is not None
        both = None not in (self.response_format, self.structured_outputs)
        return [
            (self.stream_options is None or bool(self.stream), "stream_options", "needs stream: true"),
            (self.best_of is None or self.best_of >= (self.n or 1), "best_of", f"is below n, {self.n}"),
            (not (self.stream and self.choices > (self.n or 1)), "best_of", "above n can't be streamed"),
            (not both, "structured_outputs", "has no place beside response_format; set one of them"),
            (not (structured and self.ignore_eos), "ignore_eos", "would go on after the end of a structured answer"),
            *self.formula_conditions(),
            *self.beam_conditions(),
            *self._beam_search_conditions(),
        ]

    def _beam_search_conditions(self) -> list[tuple[bool, str, str]]:
        if not self.searches:
            return []
        prompt_logprobs = "prompt_logprobs" if self.prompt_logprobs is not None else "echo"  # beside logprobs
        reason = "has no place in a beam search"
        return [
            (self.prompt_logprob_count is None, prompt_logprobs, f"with log-probabilities {reason}"),
            (self.max_time is None, "max_time", reason),
            (self.wanted_formula(None) is None, self.formula_field, reason),
            ((self.n or 1) <= (self.num_beams or MAX_BEAMS), "n", f"is above num_beams, {self.num_beams}"),
        ]

    @property
    def wanted_max_tokens(self) -> int | None:
        """Limit of the answer's tokens that the client set, under any of its names."""
        return self.max_tokens

    @property
    def limit_is_upper_bound(self) -> bool:
        """Whether a limit above the room in the context is lowered, not an error."""
        return False

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def prompt_only(self) -> bool:
        """Whether the answer is the echoed prompt alone."""
        return False

    @property
    def echoes(self) -> bool:
        """Whether answers begin with their prompt."""
        return False

    @property
    def choices(self) -> int:
        """Number of answers to make for each prompt. A beam search returns only its `n` best."""
        if self.searches:
            return self.n or 1
        return max(self.n or 1, self.best_of or 1)

    @property
    def logprob_count(self) -> int | None:
        """Most probable tokens to report per position of the answer; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def prompt_logprob_count(self) -> int | None:
        """Most probable tokens to report per position of the prompt; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def structure(self) -> Structure | None:
        """Structure that the answer must have; None: free text."""
        wanted = self.structured_outputs or self.response_format
        return None if wanted is None else wanted.structure

    @property
    def structure_field(self) -> str:
        """Field that asks for the structure."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def compressed(self) -> Compressed | None:
        """What compression did to the prompts; None: nothing."""
        return self._compressed

    @compressed.setter
    def compressed(self, compressed: Compressed) -> None:
        self._compressed = compressed

    @property
    def compressed_prompt(self) -> str | list[str] | list[dict[str, Any]] | None:
        """The compressed prompt, if the answer should have it."""
        return None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def switches(self) -> Mapping[str, Any]:
        """Variables that turn thinking on or off, for chat templates that have them."""
        return {}

    @property
    def switch_field(self) -> str:
        """Field that asks for the switches."""
        return ""

    def sampling(
        self,
        *,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        seed: int,
        defaults: SamplingFields = _NO_DEFAULTS,
        bad_words_ids: Sequence[tuple[int, ...]] = (),
        verification: Verification = "coupled",
    ) -> SamplingParams:
        """Build the decoder's parameters; raises InvalidRequestError if one is out of range.

        defaults, verification: the endpoint's, for fields that are null.
        """
        fields = self.with_defaults(defaults)
        if self.searches:
            fields = fields.model_copy(update={"temperature": self.temperature or 0.0, "max_time": None})
        structure, logprobs = self.structure, self.logprob_count
        return SamplingParams(
            **fields.arguments(),
            max_tokens=max_tokens,
            seed=seed,
            eos_token_ids=() if fields.ignore_eos and structure is None else tuple(eos_token_ids),
            bad_words_ids=tuple(bad_words_ids),
            structure=structure,
            verification=self.verification or verification,
            logprobs=0 if logprobs is None and self.choices > (self.n or 1) else logprobs,  # best_of ranks by them
            prompt_logprobs=self.prompt_logprob_count,
        )

    def seed_or_new(self) -> int:
        """The client's seed, or a new one."""
        return secrets.randbits(_SEED_BITS) if self.seed in (None, _DRAW_SEED) else self.seed


class ConversationRequest(GenerationRequest, ToolUse):
    """A request to answer in a conversation: what chat, responses and messages share."""

    def to_conversation(self) -> Conversation:
        """Return the whole conversation as chat has it."""
        raise NotImplementedError

    def _conditions(self) -> list[tuple[bool, str, str]]:
        return [*super()._conditions(), *self.tool_conditions()]

    @property
    def own_structure(self) -> tuple[str, Structure | None] | None:
        """The field by which this API alone asks for a structure, and that; None: it is not set."""
        return None

    @property
    def shared_structure(self) -> Structure | None:
        """The structure by the fields that all APIs have."""
        return super().structure

    @property
    def structure(self) -> Structure | None:
        own = self.own_structure
        return self.forced_structure() or (self.shared_structure if own is None else own[1])

    @property
    def structure_field(self) -> str:
        own = self.own_structure
        return "tools" if self.must_call else super().structure_field if own is None else own[0]
