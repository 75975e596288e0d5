"""What clients get: OpenAI's completions and chat completions, whole or in chunks, with `speculation` and `seed`."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from actors.request import Delta, Request, Statistics
from decoding.stopping import FinishReason


class Usage(BaseModel):
    """Tokens of all prompts and all answers."""

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


class CompletionChoice(BaseModel):
    """A text, or the next piece of it."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None


class ChatMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str


class ChatPiece(BaseModel):
    """The next piece of the assistant's turn. Only the first one names the role."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChoice(BaseModel):
    """A whole answer."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason | None


class ChatChunkChoice(BaseModel):
    """A piece of an answer."""

    index: int
    delta: ChatPiece
    finish_reason: FinishReason | None


Choice = CompletionChoice | ChatChoice | ChatChunkChoice


class Answer(BaseModel):
    """The body of an answer, or of one of its chunks. Fields that are not set are not sent."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: Sequence[Choice]
    usage: Usage | None = None
    speculation: Speculation | None = None
    seed: int | None = None

    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class AnswerWriter(ABC):
    """Turns the deltas of one HTTP request, which has one or more prompts, into its answer."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(self, requests: Sequence[Request], *, model: str, seed: int) -> None:
        self._id = self.id_prefix + secrets.token_hex(12)
        self._created = int(time.time())
        self._model, self._seed = model, seed
        self._prompt_tokens = sum(len(request.prompt) for request in requests)
        self._texts: list[list[str]] = [[] for _ in requests]
        self._finish: list[FinishReason | None] = [None for _ in requests]
        self._statistics = [Statistics() for _ in requests]

    def add(self, index: int, delta: Delta) -> Answer | None:
        """Take in a delta; returns its chunk, or None if there is nothing to show. The last one has the statistics."""
        first = not self._texts[index]
        self._texts[index].append(delta.text)
        self._statistics[index] = delta.statistics
        self._finish[index] = delta.finish
        if not (delta.text or delta.finish or first):
            return None
        chunk = self._answer(self.chunk_object, [self._chunk_choice(index, delta.text, delta.finish, first=first)])
        if all(self._finish):
            chunk.speculation, chunk.seed = self._speculation(), self._seed
        return chunk

    def usage_chunk(self) -> Answer:
        """What ends a stream with `include_usage`."""
        chunk = self._answer(self.chunk_object, [])
        chunk.usage, chunk.speculation, chunk.seed = self._usage(), self._speculation(), self._seed
        return chunk

    def whole(self) -> Answer:
        """The whole answer, once all deltas are in."""
        texts = ("".join(pieces) for pieces in self._texts)
        choices = [
            self._choice(i, text, finish) for i, (text, finish) in enumerate(zip(texts, self._finish, strict=True))
        ]
        answer = self._answer(self.object, choices)
        answer.usage, answer.speculation, answer.seed = self._usage(), self._speculation(), self._seed
        return answer

    def _answer(self, kind: str, choices: Sequence[Choice]) -> Answer:
        return Answer(id=self._id, object=kind, created=self._created, model=self._model, choices=choices)

    @abstractmethod
    def _choice(self, index: int, text: str, finish: FinishReason | None) -> Choice:
        """A whole answer's choice."""

    @abstractmethod
    def _chunk_choice(self, index: int, text: str, finish: FinishReason | None, *, first: bool) -> Choice:
        """A chunk's choice; first: no chunk of this index came before."""

    def _usage(self) -> Usage:
        committed = self._total().committed
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=committed,
            total_tokens=self._prompt_tokens + committed,
        )

    def _speculation(self) -> Speculation:
        total = self._total()
        return Speculation(
            steps=total.steps,
            drafted=total.drafted,
            accepted=total.accepted,
            acceptance_rate=round(total.acceptance_rate, 4),
            acceptance_length=round(total.acceptance_length, 4),
        )

    def _total(self) -> Statistics:
        return sum(self._statistics, Statistics())


class CompletionWriter(AnswerWriter):
    """POST /v1/completions."""

    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def _choice(self, index: int, text: str, finish: FinishReason | None) -> CompletionChoice:
        return CompletionChoice(index=index, text=text, logprobs=None, finish_reason=finish)

    def _chunk_choice(self, index: int, text: str, finish: FinishReason | None, *, first: bool) -> CompletionChoice:
        return self._choice(index, text, finish)


class ChatWriter(AnswerWriter):
    """POST /v1/chat/completions."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, text: str, finish: FinishReason | None) -> ChatChoice:
        return ChatChoice(index=index, message=ChatMessage(role="assistant", content=text), finish_reason=finish)

    def _chunk_choice(self, index: int, text: str, finish: FinishReason | None, *, first: bool) -> ChatChunkChoice:
        piece = ChatPiece(role="assistant", content=text) if first else ChatPiece(content=text)
        return ChatChunkChoice(index=index, delta=piece, finish_reason=finish)
