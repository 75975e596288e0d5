"""What clients get: OpenAI's completions and chat completions, whole or in chunks, with `speculation` and `seed`."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, SkipValidation

from actors.coordinator.request import Statistics
from decoding.sampling.stopping import FinishReason
from deployments.answers.ensemble_details import EnsembleDetail, ProgressDetail
from deployments.answers.token_details import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenDetail


class Usage(BaseModel):
    """Tokens of all prompts, each once, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Speculation(BaseModel):
    """How speculation went, summed over the answers."""

    steps: int  # target steps
    drafted: int
    accepted: int
    acceptance_rate: float  # accepted / drafted
    acceptance_length: float  # tokens per target step
    hit_rate: float  # of the steps that rejected a draft, how many found one for the other way


def speculation_of(total: Statistics) -> Speculation:
    """What clients are told of the statistics of all answers together."""
    return Speculation(
        steps=total.steps,
        drafted=total.drafted,
        accepted=total.accepted,
        acceptance_rate=round(total.acceptance_rate, 4),
        acceptance_length=round(total.acceptance_length, 4),
        hit_rate=round(total.hit_rate, 4),
    )


class AnyChoice(BaseModel):
    """What choices have in common. Fields that are not set are not sent."""

    index: int
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None = None
    score: float | None = None  # of a beam search
    token_details: SkipValidation[list[TokenDetail] | None] = None
    ensemble: EnsembleDetail | None = None


class CompletionChoice(AnyChoice):
    """A text, or the next piece of it."""

    text: str
    logprobs: SkipValidation[CompletionLogprobs | None]
    prompt_logprobs: SkipValidation[PromptLogprobs | None] = None


class FunctionCall(BaseModel):
    """What the model wants called."""

    name: str
    arguments: str  # JSON


class ToolCall(BaseModel):
    """A call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionPiece(BaseModel):
    """The name of a function, or the next piece of its arguments."""

    name: str | None = None
    arguments: str


class ToolCallPiece(BaseModel):
    """The next piece of a call. Only the first one names it. Fields that are not set are not sent."""

    index: int  # among the choice's calls
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class ChatMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatPiece(BaseModel):
    """The next piece of the assistant's turn. Only the first one names the role."""

    role: Literal["assistant"] | None = None
    content: str
    tool_calls: list[ToolCallPiece] | None = None


class ChatChoice(AnyChoice):
    """A whole answer."""

    message: ChatMessage
    logprobs: SkipValidation[ChatLogprobs | None]


class ChatChunkChoice(AnyChoice):
    """A piece of an answer."""

    delta: ChatPiece
    logprobs: SkipValidation[ChatLogprobs | None]


AnswerChoice = CompletionChoice | ChatChoice | ChatChunkChoice


class Answer(BaseModel):
    """The body of an answer, or of one of its chunks. Fields that are not set are not sent."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: Sequence[AnswerChoice]
    prompt_logprobs: SkipValidation[PromptLogprobs | None] = None  # of a chat
    usage: Usage | None = None
    speculation: Speculation | None = None
    seed: int | None = None
    progress: ProgressDetail | None = None  # of a stream, before the answer to a choice is there

    def document(self) -> dict[str, Any]:
        """What is set, for msgspec: what is told of tokens is JSON already."""
        return self.model_dump(exclude_unset=True, warnings=False)

    def json_text(self) -> str:
        return msgspec.json.encode(self.document()).decode()
