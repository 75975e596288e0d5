"""Writes answers to /v1/chat/completions: reasoning, content, tool calls."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from actors.coordinator.request import Request
from deployments.apis.chat.request import ChatRequest
from deployments.apis.choices import (
    Answer,
    AnswerWriter,
    ChatChoice,
    ChatChunkChoice,
    ChatFinishReason,
    ChatMessage,
    ChatPiece,
    FunctionCall,
    FunctionPiece,
    ToolCall,
    ToolCallPiece,
)
from deployments.apis.decoder import TokenDecoder
from deployments.apis.parser import make_parser
from deployments.apis.parts import Part, reasoning_tokens
from deployments.apis.token_details import Json, chat_logprobs
from deployments.apis.tool_calls import AnswerEvent, AnswerParser, Arguments, CallStart, Reasoning
from deployments.apis.writer import AnswerIdentity


@dataclass(slots=True)
class _Piece:
    """What a chunk adds: reasoning, or content and calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)

    def has_room(self, event: AnswerEvent | ToolCallPiece) -> bool:
        """Whether the event may be in this piece: only the next piece of reasoning, and once the same call."""
        match event:
            case Reasoning():
                return not (self.content or self.calls)
            case ToolCallPiece(index=index):
                return not self.reasoning and all(call.index != index for call in self.calls)
        return not self.reasoning

    @property
    def document(self) -> ChatPiece:
        piece = ChatPiece(content=self.content)
        if self.reasoning:
            piece.reasoning_content = self.reasoning
        if self.calls:
            piece.tool_calls = self.calls
        return piece


class ChatTurn:
    """Splits one answer, whole or streamed, into reasoning, content and tool calls."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._count = 0

    def whole(self, part: Part) -> ChatMessage:
        """The turn of a whole answer."""
        reasoning, content, calls = list[str](), list[str](), list[tuple[CallStart, list[str]]]()
        for event in self._events(part):
            match event:
                case str():
                    content.append(event)
                case Reasoning(text):
                    reasoning.append(text)
                case CallStart():
                    calls.append((event, []))
                case Arguments(text):
                    calls[-1][1].append(text)
        message = ChatMessage(role="assistant", content="".join(content) or (None if calls else ""))
        if reasoning:
            message.reasoning_content = "".join(reasoning)
        if calls:
            message.tool_calls = [_tool_call(start, "".join(arguments)) for start, arguments in calls]
        return message

    def pieces(self, part: Part) -> Sequence[ChatPiece]:
        """Pieces that the next part adds, at least one. A piece has at most one new piece of each call."""
        pieces = [_Piece()]
        for event in self._events(part):
            new = event if isinstance(event, str | Reasoning) else self._piece(event)
            if not pieces[-1].has_room(new):
                pieces.append(_Piece())
            match new:
                case str():
                    pieces[-1].content += new
                case Reasoning(text):
                    pieces[-1].reasoning += text
                case _:
                    pieces[-1].calls.append(new)
        return [piece.document for piece in pieces]

    def finish_reason(self, part: Part) -> ChatFinishReason | None:
        """Why the answer ended with this part: `tool_calls` instead of `stop` if it has calls; None: it goes on."""
        return "tool_calls" if self._parser.has_called and part.finish == "stop" else part.finish

    def _events(self, part: Part) -> Iterable[AnswerEvent]:
        return self._parser.add(part.text, last=part.finish is not None)

    def _piece(self, event: CallStart | Arguments) -> ToolCallPiece:
        if isinstance(event, Arguments):
            return ToolCallPiece(index=self._count - 1, function=FunctionPiece(arguments=event.text))
        self._count += 1
        function = FunctionPiece(name=event.name, arguments="")
        return ToolCallPiece(index=self._count - 1, id=event.id, type="function", function=function)


def _tool_call(start: CallStart, arguments: str) -> ToolCall:
    return ToolCall(id=start.id, type="function", function=FunctionCall(name=start.name, arguments=arguments))


class ChatWriter(AnswerWriter):
    """POST /v1/chat/completions."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    _body: ChatRequest

    def __init__(
        self, body: ChatRequest, requests: Sequence[Request], decoder: TokenDecoder, *, identity: AnswerIdentity
    ) -> None:
        super().__init__(body, requests, decoder, identity=identity)
        self._prompt = requests[0].prompt
        self._turns = [self._turn() for _ in requests]

    def _turn(self) -> ChatTurn:
        structured = self._body.structure is not None
        return ChatTurn(make_parser(self._body, self._prompt, self._decoder, structured=structured))

    def _choice(self, index: int, part: Part) -> ChatChoice:
        turn = self._turn()
        message = turn.whole(part)
        common = self._common(index, part) | {"finish_reason": turn.finish_reason(part)}
        return ChatChoice(message=message, logprobs=self._logprobs(part), **common)

    def _chunk_choices(self, index: int, part: Part, *, first: bool) -> Sequence[ChatChunkChoice]:
        turn = self._turns[index]
        deltas = turn.pieces(part)
        if first:
            deltas[0].role = "assistant"
        common = self._common(index, part) | {"finish_reason": turn.finish_reason(part)}
        return [
            *(ChatChunkChoice(index=index, finish_reason=None, delta=delta, logprobs=None) for delta in deltas[:-1]),
            ChatChunkChoice(delta=deltas[-1], logprobs=self._logprobs(part), **common),
        ]

    def _reasoning_tokens(self) -> int:
        if self._body.structure is not None:  # such answers have none
            return 0
        parts = [choice.whole() for choice in self._choices]
        return sum(
            reasoning_tokens(self._turn().whole(part).reasoning_content or "", part.tokens, self._decoder)
            for part in parts
        )

    def _logprobs(self, part: Part) -> Json:
        count = self._body.logprob_count
        return None if count is None else chat_logprobs(part, count, self._decoder)

    def _add_prompt_logprobs(self, answer: Answer, index: int, part: Part) -> None:
        logprobs = self._prompt_logprobs(index, part)
        if logprobs is not None:
            answer.prompt_logprobs = logprobs
