"""What clients may send, as OpenAI's API has it. A field that is accepted works; any other is refused by name."""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from decoding.params import SamplingParams
from deployments.strict import StrictModel, Text, without_surrogates, wrong_field

Prompt = str | list[int]

_MAX_STOP_STRINGS = 16
_MAX_INT = 2**31 - 1
_PROMPT_FORMS = "should be a string, a list of strings, a list of token ids, or a list of such lists"
_SEED_BITS = 53  # a drawn seed survives JSON readers that know only doubles


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _read_prompts(value: Any) -> list[Prompt]:
    """One prompt or several, texts or token ids, as a list of prompts."""
    prompts = value if _is_list(value) and value and not _is_token(value[0]) else [value]
    for prompt in prompts:
        if isinstance(prompt, str):
            without_surrogates(prompt)
        elif not (_is_list(prompt) and all(_is_token(token) for token in prompt)):
            raise PydanticCustomError("prompt", _PROMPT_FORMS)
        if not prompt:
            raise PydanticCustomError("empty", "should not be empty")
    return list(prompts)


def _only(neutral: float) -> AfterValidator:
    """For penalties: takes the value that changes nothing, which some clients always send, and refuses any other."""

    def check(value: float) -> float:
        if value != neutral:
            reason = "should be {neutral}, which changes nothing; penalties are not supported"
            raise PydanticCustomError("neutral", reason, {"neutral": neutral})
        return value

    return AfterValidator(check)


def _no_logprobs(value: object) -> None:
    if value is not None and value is not False:
        raise PydanticCustomError("logprobs", "should be null; log-probabilities are not supported")


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Limit = Annotated[int, Field(le=_MAX_INT)]
Prompts = Annotated[list[Prompt], PlainValidator(_read_prompts, json_schema_input_type=Prompt | list[Prompt])]
StopString = Annotated[Text, Field(min_length=1, max_length=1000)]
NoLogprobs = Annotated[None, BeforeValidator(_no_logprobs)]
StopStrings = Annotated[list[StopString], Field(max_length=_MAX_STOP_STRINGS), BeforeValidator(_as_list)]


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="End the stream with a chunk that has `usage`.")


class GenerationRequest(StrictModel):
    """What completions and chat have in common. A field that is null has its default."""

    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]  # None: whatever the context has room for

    model: str = Field(description="An endpoint's name, as GET /v1/models lists them.")
    max_tokens: Limit | None = Field(None, description="Most tokens to answer with.")
    temperature: float | None = Field(None, description="0 is greedy; 1 by default.")
    top_p: float | None = Field(None, description="Nucleus sampling; 1, the default, turns it off.")
    top_k: Limit | None = Field(None, description="Sample from the k most likely tokens; 0, the default, turns it off.")
    seed: int | None = Field(None, description="Same seed, same text; drawn if missing, and returned either way.")
    stop: StopStrings | None = Field(None, description="The answer ends right before any of these.")
    ignore_eos: bool | None = Field(None, description="true: go on after end-of-text tokens, up to `max_tokens`.")
    repetition_penalty: Annotated[float, _only(1.0)] | None = Field(None, description="Only 1, which changes nothing.")
    presence_penalty: Annotated[float, _only(0.0)] | None = Field(None, description="Only 0, which changes nothing.")
    frequency_penalty: Annotated[float, _only(0.0)] | None = Field(None, description="Only 0, which changes nothing.")
    logprobs: NoLogprobs = Field(None, description="Only null: answers have none.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only together with `stream`.")
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(None, description="Answers per prompt; only 1.")
    user: str | None = Field(None, description="Accepted for compatibility, and not used.")
    speculate: bool | None = Field(None, description="false: plain decoding, without the drafter. Same text.")

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "needs stream: true")
        return self

    @property
    def wanted_max_tokens(self) -> int | None:
        """The limit that the client set, under whichever name."""
        return self.max_tokens

    @property
    def prompt_count(self) -> int:
        """How many prompts the request brings."""
        return 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, *, max_tokens: int, eos_token_ids: Sequence[int], seed: int) -> SamplingParams:
        """The parameters as the decoder takes them; raises InvalidRequestError where one is out of range."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=seed,
            stop=tuple(self.stop or ()),
            eos_token_ids=() if self.ignore_eos else tuple(eos_token_ids),
        )

    def seed_or_new(self) -> int:
        """The client's seed, or a new one."""
        return secrets.randbits(_SEED_BITS) if self.seed is None else self.seed


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt_field = "prompt"
    default_max_tokens = 16

    prompt: Prompts = Field(description="A text or a list of token ids, or a list of either: one choice for each.")

    @property
    def prompt_count(self) -> int:
        return len(self.prompt)


class TextPart(StrictModel):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class Message(StrictModel):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)] = Field(description="A text, or text parts.")

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    prompt_field = "messages"
    default_max_tokens = None

    messages: Annotated[list[Message], Field(min_length=1, description="The conversation so far, oldest turn first.")]
    max_completion_tokens: Limit | None = Field(None, description="OpenAI's newer name for `max_tokens`.")

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise wrong_field("max_tokens", "differs from max_completion_tokens; set one of them")
        return self

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
