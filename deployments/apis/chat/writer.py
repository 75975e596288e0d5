"""Writes answers to /v1/chat/completions: reasoning, content, tool calls."""

from collections.abc import Sequence

from actors.coordinator.request import Request
from decoding.drafts.prediction import Alignment
from deployments.apis.chat.request import ChatRequest
from deployments.apis.choices import (
    Answer,
    AnswerWriter,
    ChatChoice,
    ChatChunkChoice,
    ChatFinishReason,
    ChatMessage,
    ChatPiece,
    CompletionTokensDetails,
    FunctionCall,
    FunctionPiece,
    ToolCall,
    ToolCallPiece,
)
from deployments.apis.decoder import TokenDecoder
from deployments.apis.events import Arguments, Call, End, Reasoning, Text
from deployments.apis.parser import AnswerStream
from deployments.apis.parts import Part, reasoning_tokens
from deployments.apis.token_details import Json, content_logprobs
from deployments.apis.writer import AnswerIdentity


class ChatWriter(AnswerWriter):
    """POST /v1/chat/completions."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    _body: ChatRequest

    def __init__(
        self, body: ChatRequest, requests: Sequence[Request], decoder: TokenDecoder, *, identity: AnswerIdentity
    ) -> None:
        super().__init__(body, requests, decoder, identity=identity)
        self._predictions = [request.prediction for request in requests]
        structured = body.structure is not None
        self._turns = [
            _Turn(AnswerStream(body, request.prompt, decoder, structured=structured)) for request in requests
        ]

    def _choice(self, index: int, part: Part) -> ChatChoice:
        turn = self._turns[index]
        common = self._common(index, part) | {"finish_reason": turn.finish}
        return ChatChoice(message=turn.message(), logprobs=self._logprobs(part), **common)

    def _read(self, index: int, part: Part) -> list[ChatPiece]:
        return self._turns[index].read(part)

    def _chunk_choices(
        self, index: int, part: Part, deltas: Sequence[ChatPiece], *, first: bool
    ) -> Sequence[ChatChunkChoice]:
        if first:
            deltas[0].role = "assistant"
        common = self._common(index, part) | {"finish_reason": self._turns[index].finish}
        return [
            *(ChatChunkChoice(index=index, finish_reason=None, delta=delta, logprobs=None) for delta in deltas[:-1]),
            ChatChunkChoice(delta=deltas[-1], logprobs=self._logprobs(part), **common),
        ]

    def _completion_tokens_details(self) -> CompletionTokensDetails:
        details = super()._completion_tokens_details()
        for turn, choice, prediction in zip(self._turns, self._choices, self._predictions, strict=True):
            tokens = choice.whole().token_ids
            details.reasoning_tokens += reasoning_tokens(turn.reasoning, tokens, self._decoder)
            alignment = Alignment(prediction)
            alignment.follow(tokens if prediction else ())
            details.accepted_prediction_tokens += alignment.matched
            details.rejected_prediction_tokens += len(prediction) - alignment.matched
        return details

    def _logprobs(self, part: Part) -> Json:
        count = self._body.logprob_count
        return None if count is None else {"content": content_logprobs(part, count, self._decoder), "refusal": None}

    def _add_prompt_logprobs(self, answer: Answer, index: int, part: Part) -> None:
        logprobs = self._prompt_logprobs(index, part)
        if logprobs is not None:
            answer.prompt_logprobs = logprobs


class _Turn:
    """The assistant's turn in one choice, as far as it has come."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream
        self._reasoning, self._content = list[str](), list[str]()
        self._calls = list[tuple[Call, list[str]]]()
        self.finish: ChatFinishReason | None = None  # None: it goes on

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def read(self, part: Part) -> list[ChatPiece]:
        """Return the pieces that the part adds, at least one. None has reasoning beside others, or a call twice."""
        pieces = [ChatPiece(content="")]
        for event in self._stream.add(part):
            match event:
                case Text(text):
                    self._content.append(text)
                    _last(pieces, has_room=not pieces[-1].reasoning_content).content += text
                case Reasoning(text):
                    self._reasoning.append(text)
                    piece = _last(pieces, has_room=not (pieces[-1].content or pieces[-1].tool_calls))
                    piece.reasoning_content = (piece.reasoning_content or "") + text
                case Call(name):
                    self._calls.append((event, []))
                    function = FunctionPiece(name=name, arguments="")
                    index = len(self._calls) - 1
                    _add_call(pieces, ToolCallPiece(index=index, id=event.id, type="function", function=function))
                case Arguments(text):
                    self._calls[-1][1].append(text)
                    index = len(self._calls) - 1
                    _add_call(pieces, ToolCallPiece(index=index, function=FunctionPiece(arguments=text)))
                case End(reason):
                    self.finish = "tool_calls" if reason == "calls" else reason
        return pieces

    def message(self) -> ChatMessage:
        """Return the turn so far."""
        content = "".join(self._content)
        message = ChatMessage(role="assistant", content=content or (None if self._calls else ""))
        if self._reasoning:
            message.reasoning_content = self.reasoning
        if self._calls:
            message.tool_calls = [
                ToolCall(
                    id=call.id, type="function", function=FunctionCall(name=call.name, arguments="".join(arguments))
                )
                for call, arguments in self._calls
            ]
        return message


def _add_call(pieces: list[ChatPiece], new: ToolCallPiece) -> None:
    calls = pieces[-1].tool_calls or []
    has_room = not pieces[-1].reasoning_content and all(call.index != new.index for call in calls)
    piece = _last(pieces, has_room=has_room)
    piece.tool_calls = [*(piece.tool_calls or ()), new]


def _last(pieces: list[ChatPiece], *, has_room: bool) -> ChatPiece:
    """Return the last piece, or a new one if that has no room for what comes."""
    if not has_room:
        pieces.append(ChatPiece(content=""))
    return pieces[-1]
