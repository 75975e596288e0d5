"""Answers, whole or in pieces, read from documents of the HTTP interface. Must not know who made them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers to a prompt."""

    text: str  # of a conversation: the content
    finish_reason: str  # stop, length or tool_calls
    stop_reason: str | int | None = None  # the stop string or token, or the criterion
    reasoning: str | None = None  # what came before the content
    tool_calls: Sequence[ToolCall] = ()
    logprobs: Mapping[str, Any] | None = None  # as in the HTTP interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a prompt or a conversation; `text` and `tool_calls` are the first choice's."""

    choices: Sequence[Choice]
    prompt_tokens: int
    completion_tokens: int  # of all choices
    seed: int  # asks for the same text again
    drafted: int  # draft tokens that were verified
    accepted: int
    document: Mapping[str, Any] = field(repr=False)  # all that the HTTP interface says

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """Tool calls of the first choice."""
        return self.choices[0].tool_calls

    @staticmethod
    def read(document: Mapping[str, Any]) -> "Answer":
        """Read a completion or a chat completion."""
        return Answer(
            choices=[_read_choice(choice) for choice in document["choices"]],
            prompt_tokens=document["usage"]["prompt_tokens"],
            completion_tokens=document["usage"]["completion_tokens"],
            seed=document["seed"],
            drafted=document["speculation"]["drafted"],
            accepted=document["speculation"]["accepted"],
            document=document,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next piece of a streamed answer. The last one of a choice has `finish_reason`."""

    text: str
    index: int = 0  # of the choice
    reasoning: str | None = None
    finish_reason: str | None = None
    document: Mapping[str, Any] = field(repr=False)  # the chunk of the HTTP interface

    @staticmethod
    def read(document: Mapping[str, Any]) -> "Piece":
        """Read a chunk with one choice."""
        (choice,) = document["choices"]
        delta = choice.get("delta", {})
        return Piece(
            text=choice.get("text") or delta.get("content") or "",
            index=choice["index"],
            reasoning=delta.get("reasoning_content"),
            finish_reason=choice.get("finish_reason"),
            document=document,
        )


def _read_choice(choice: Mapping[str, Any]) -> Choice:
    message = choice.get("message", {})
    calls = message.get("tool_calls") or ()
    return Choice(
        text=choice.get("text") or message.get("content") or "",
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        reasoning=message.get("reasoning_content"),
        tool_calls=[ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls],
        logprobs=choice.get("logprobs"),
    )
