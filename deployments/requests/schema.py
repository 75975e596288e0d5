"""Bodies of POST /v1/completions and /v1/chat/completions, OpenAI's API. Knows no models."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from decoding.sampling.params import MAX_LOGPROBS, Structure
from deployments.requests.compatibility_fields import ChatCompatibilityFields
from deployments.requests.fields import Items, Limit, Prompts, only
from deployments.requests.generation_request import GenerationRequest
from deployments.requests.message import Message
from deployments.requests.prompt_fields import CompressionFields, ShortenedPrompt, TemplateFields
from deployments.requests.thinking import thinking_variables
from deployments.requests.tool_fields import ToolFields
from deployments.validation.strict import Text

_MAX_CHAT_LOGPROBS = 20


def _null_as_empty(value: object) -> object:
    return [] if value is None else value


class CompletionRequest(GenerationRequest, TemplateFields, CompressionFields):
    """POST /v1/completions."""

    prompt_field = "prompt"
    logprobs_field = "logprobs"
    default_max_tokens = 16

    prompt: Prompts = Field([], description="A text or a list of token ids, or a list of either: one choice for each.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Report the answer's tokens and this many most probable ones per position."
    )
    echo: bool | None = Field(
        None, description="Begin the text with the prompt, which may be all of it (`max_tokens: 0`)."
    )
    suffix: Annotated[str, only("", why="insertion is not supported")] | None = Field(
        None, description="Only an empty text."
    )

    def _conditions(self) -> list[tuple[bool, str, str]]:
        return [
            *super()._conditions(),
            *self.template_conditions(),
            (bool(self.prompt) or self.template is not None, "prompt", "is required, or else a template"),
            (not self.prompt or self.template is None, "prompt", "has no place beside template; set one of them"),
        ]

    @property
    def prompt_count(self) -> int:
        return len(self.prompt) or 1

    @property
    def original_prompt_tokens(self) -> int | None:
        return self.original_tokens

    @property
    def shortened_prompts(self) -> list[ShortenedPrompt] | None:
        return self.shortened

    @property
    def compressed_prompt(self) -> str | list[str] | list[dict[str, Any]] | None:
        if not (self.prompt_compression and self.prompt_compression.return_prompt):
            return None
        texts = [prompt for prompt in self.prompt if isinstance(prompt, str)]
        texts = [prompt.text for prompt in self.shortened or ()] or texts
        return texts[0] if len(texts) == 1 else texts

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def prompt_only(self) -> bool:
        return self.echoes and self.max_tokens == 0

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprob_count(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        counts = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(counts, default=None)


class ChatRequest(GenerationRequest, TemplateFields, CompressionFields, ToolFields, ChatCompatibilityFields):
    """POST /v1/chat/completions."""

    prompt_field = "messages"
    default_max_tokens = None

    messages: Annotated[Items[Message], BeforeValidator(_null_as_empty)] = Field(
        [], description="The conversation so far, oldest turn first."
    )
    max_completion_tokens: Limit | None = Field(
        None,
        description="OpenAI's newer name for `max_tokens`, which it overrules; no error where the context is smaller.",
    )
    logprobs: bool | None = Field(None, description="true: answers have log-probabilities.")
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_CHAT_LOGPROBS)] | None = Field(
        None, description="Report this many most probable tokens per position; needs `logprobs`."
    )
    add_generation_prompt: bool | None = Field(None, description="false: don't begin the assistant's turn.")
    continue_final_message: bool | None = Field(
        None, description="true: the answer goes on with the last message; needs `add_generation_prompt: false`."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")
    reasoning_effort: Text | None = Field(
        None, description="For the chat template, if it has such a switch; `none` turns thinking off."
    )
    enable_thinking: bool | None = Field(None, description="Whether to think, for the chat template, if it can tell.")

    def _conditions(self) -> list[tuple[bool, str, str]]:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        return [
            *super()._conditions(),
            *self.template_conditions(),
            (bool(self.messages) or self.template is not None, "messages", "is required, or else a template"),
            (len(limits) < 2 or not self.strict, "max_tokens", "differs from max_completion_tokens; set one of them"),
            (
                not self.continue_final_message or self.add_generation_prompt is False,
                "continue_final_message",
                "needs add_generation_prompt: false",
            ),
            (not self.top_logprobs or bool(self.logprobs), "top_logprobs", "needs logprobs: true"),
            *self.tool_conditions(),
        ]

    @property
    def original_prompt_tokens(self) -> int | None:
        return self.original_tokens

    @property
    def shortened_prompts(self) -> list[ShortenedPrompt] | None:
        return self.shortened

    @property
    def compressed_prompt(self) -> str | list[str] | list[dict[str, Any]] | None:
        wanted = self.prompt_compression and self.prompt_compression.return_prompt
        if wanted and self.shortened:
            return self.shortened[0].text
        return [message.turn for message in self.messages] if wanted else None

    @property
    def switches(self) -> Mapping[str, Any]:
        return thinking_variables(self.reasoning_effort, self.enable_thinking)

    @property
    def switch_field(self) -> str:
        return "reasoning_effort" if self.enable_thinking is None else "enable_thinking"

    @property
    def structure(self) -> Structure | None:
        return self.forced_structure() or super().structure

    @property
    def structure_field(self) -> str:
        return "tools" if self.must_call else super().structure_field

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_is_upper_bound(self) -> bool:
        return self.max_completion_tokens is not None

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
