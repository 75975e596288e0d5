"""Body of POST /v1/chat/completions, OpenAI's API of conversations."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deployments.fields.conversation import Conversation, Document, Message, TextParts, ToolFields, thinking_variables
from deployments.fields.generation import ConversationRequest
from deployments.fields.prompts import CompressionFields, TemplateFields
from deployments.fields.strict import StrictModel, Text
from deployments.fields.types import Items, Limit, only, without_effect

_NEWER = "send tools and tool_choice"
_MAX_CHAT_LOGPROBS = 20
_MOST_DOCUMENTS = 128


class ChatCompatibilityFields(StrictModel):
    """Fields without effect in chat alone."""

    functions: Annotated[list[Any], only([], why=_NEWER)] | None = Field(
        None, description="Only an empty list; `tools` has replaced it."
    )
    function_call: Annotated[Any, only("none", "auto", why=_NEWER)] = Field(
        None, description="Only `none` or `auto`; `tool_choice` has replaced it."
    )
    verbosity: Annotated[Any, without_effect("medium")] = Field(None, description="Without effect.")
    modalities: Annotated[Items[str], only(["text"], why="answers are text")] | None = Field(
        None, description='Only `["text"]`.'
    )
    audio: Annotated[Any, only(why="answers are text")] = Field(None, description="Only null.")
    web_search_options: Annotated[Any, only(why="there is no web search")] = Field(None, description="Only null.")


class Prediction(StrictModel):
    """What the answer will probably be, such as a file that it changes."""

    type: Literal["content"]
    content: TextParts = Field(description="A text, or text parts.")

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatRequest(ToolFields, ConversationRequest, TemplateFields, CompressionFields, ChatCompatibilityFields):
    """POST /v1/chat/completions."""

    prompt_field = "messages"
    default_max_tokens = None

    messages: Annotated[Items[Message], BeforeValidator(lambda value: [] if value is None else value)] = Field(
        [], description="The conversation so far, oldest turn first."
    )
    max_completion_tokens: Limit | None = Field(
        None,
        description="OpenAI's newer name for `max_tokens`, which it overrules; no error where the context is smaller.",
    )
    documents: Annotated[Items[Document], Field(max_length=_MOST_DOCUMENTS)] | None = Field(
        None,
        description="What the answer should rest on, each with a `text` and perhaps a `title`: where the chat template "
        "puts documents, or before the last message of the user.",
    )
    prediction: Prediction | None = Field(
        None,
        description='`{"type": "content", "content": …}`: text that the answer will mostly repeat. Drafts are copied '
        "from it. Same text.",
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
        ]

    @property
    def compressed_prompt(self) -> str | list[str] | list[dict[str, Any]] | None:
        wanted = self.prompt_compression and self.prompt_compression.return_prompt
        if wanted and self.compressed and self.compressed.prompts:
            return self.compressed.prompts[0].text
        return [message.turn for message in self.messages] if wanted else None

    def to_conversation(self) -> Conversation:
        return Conversation(
            self.messages,
            {**self.switches, **(self.chat_template_kwargs or {})},
            self.add_generation_prompt is not False,
            bool(self.continue_final_message),
            self.offered_tools,
            self.documents or (),
        )

    @property
    def switches(self) -> Mapping[str, Any]:
        return thinking_variables(self.reasoning_effort, self.enable_thinking)

    @property
    def switch_field(self) -> str:
        return "reasoning_effort" if self.enable_thinking is None else "enable_thinking"

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_is_upper_bound(self) -> bool:
        return self.max_completion_tokens is not None

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
