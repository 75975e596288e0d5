"""Models of OpenAI's completions and chat completions, whole or in chunks. Knows nothing of how they come about."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, SkipValidation

from actors.coordinator.request import Statistics
from decoding.sampling.stopping import FinishReason
from deployments.answers.ensemble_details import EnsembleDetail, ProgressDetail
from deployments.answers.token_details import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenDetail


class PromptTokensDetails(BaseModel):
    """What the prompts' tokens are made of."""

    cached_tokens: int  # not computed, because a cache had them


class CompletionTokensDetails(BaseModel):
    """What the answers' tokens are made of."""

    reasoning_tokens: int  # up to the end of what the model wrote before its content


class CompressionUsage(BaseModel):
    """What compression did to the prompts."""

    original_tokens: int
    compressed_tokens: int
    ratio: float  # compressed_tokens / original_tokens


class Usage(BaseModel):
    """Token counts. A prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    prompt_compression: CompressionUsage | None = None  # not sent without compression


class ProposerCounts(BaseModel):
    """One proposer's share of the draft tokens. A token that several offer counts for the first."""

    drafted: int
    accepted: int


class Speculation(BaseModel):
    """Statistics of speculation, summed over the answers."""

    steps: int  # target steps
    drafted: int
    accepted: int
    acceptance_rate: float  # accepted / drafted
    acceptance_length: float  # tokens per target step
    hit_rate: float  # share of rejections after which an alternative draft was ready
    proposers: dict[str, ProposerCounts]  # by the name of who drafted them


def speculation_of(total: Statistics) -> Speculation:
    """Build `speculation` from the summed statistics."""
    return Speculation(
        steps=total.steps,
        drafted=total.drafted,
        accepted=total.accepted,
        acceptance_rate=round(total.acceptance_rate, 4),
        acceptance_length=round(total.acceptance_length, 4),
        hit_rate=round(total.hit_rate, 4),
        proposers={
            name: ProposerCounts(drafted=count, accepted=total.accepted_by.get(name, 0))
            for name, count in total.drafted_by.items()
        },
    )


ChatFinishReason = FinishReason | Literal["tool_calls"]


class AnyChoice(BaseModel):
    """Fields that all choices share. Unset fields are not sent."""

    index: int
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    score: float | None = None  # of a beam search
    token_details: SkipValidation[list[TokenDetail] | None] = None
    ensemble: EnsembleDetail | None = None


class CompletionChoice(AnyChoice):
    """A text or its next piece."""

    text: str
    logprobs: SkipValidation[CompletionLogprobs | None]
    prompt_logprobs: SkipValidation[PromptLogprobs | None] = None


class FunctionCall(BaseModel):
    """A function that the model calls."""

    name: str
    arguments: str  # JSON


class ToolCall(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionPiece(BaseModel):
    """A function's name, or the next piece of its arguments."""

    name: str | None = None
    arguments: str


class ToolCallPiece(BaseModel):
    """Next piece of a tool call. Only the first names the function. Unset fields are not sent."""

    index: int  # among the choice's calls
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class ChatMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatPiece(BaseModel):
    """Next piece of the assistant's turn. Only the first names the role."""

    role: Literal["assistant"] | None = None
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class ChatChoice(AnyChoice):
    """A choice of a whole answer."""

    message: ChatMessage
    logprobs: SkipValidation[ChatLogprobs | None]


class ChatChunkChoice(AnyChoice):
    """A choice of a chunk."""

    delta: ChatPiece
    logprobs: SkipValidation[ChatLogprobs | None]


AnswerChoice = CompletionChoice | ChatChoice | ChatChunkChoice


class Answer(BaseModel):
    """Body of an answer or of one of its chunks. Unset fields are not sent."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: Sequence[AnswerChoice]
    prompt_logprobs: SkipValidation[PromptLogprobs | None] = None  # of a chat
    usage: Usage | None = None
    speculation: Speculation | None = None
    seed: int | None = None
    compressed_prompt: str | list[str] | list[dict[str, Any]] | None = None
    progress: ProgressDetail | None = None  # in streams of strategies, before an answer

    def document(self) -> dict[str, Any]:
        """Set fields, for msgspec; the fields about tokens are encoded already."""
        return self.model_dump(exclude_unset=True, warnings=False)

    def json_text(self) -> str:
        return msgspec.json.encode(self.document()).decode()
