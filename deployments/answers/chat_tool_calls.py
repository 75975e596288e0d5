"""Tool calls of a chat answer in OpenAI's format. Knows no syntax of calls."""

from collections.abc import Iterable, Sequence

from deployments.answers.parts import Part
from deployments.answers.schema import ChatFinishReason, FunctionCall, FunctionPiece, ToolCall, ToolCallPiece
from deployments.answers.tool_call_parser import ToolCallParser
from deployments.requests.tool_fields import ToolUse
from deployments.tokenizers.tool_format import AnswerEvent, Arguments, CallStart, ToolFormat

Piece = tuple[str, list[ToolCallPiece]]  # new content, new pieces of calls


def make_parser(body: ToolUse, tool_format: ToolFormat | None) -> ToolCallParser:
    """Parser of one answer to the request."""
    if not body.offered_tools:
        return ToolCallParser(None)
    name = None if body.tool_choice is None else body.tool_choice.name
    return ToolCallParser(tool_format, must_call=body.must_call, name=name)


class ChatToolCalls:
    """Splits one answer, whole or streamed, into content and tool calls."""

    def __init__(self, body: ToolUse, tool_format: ToolFormat | None) -> None:
        self._parser = make_parser(body, tool_format)
        self._count = 0

    def whole(self, part: Part) -> tuple[str, list[ToolCall]]:
        """Content and calls of a whole answer."""
        content, calls = list[str](), list[tuple[CallStart, list[str]]]()
        for event in self._events(part):
            if isinstance(event, str):
                content.append(event)
            elif isinstance(event, CallStart):
                calls.append((event, []))
            else:
                calls[-1][1].append(event.text)
        return "".join(content), [_tool_call(start, "".join(arguments)) for start, arguments in calls]

    def pieces(self, part: Part) -> Sequence[Piece]:
        """Pieces that the next part adds, at least one. A piece has at most one new piece of each call."""
        pieces: list[Piece] = [("", [])]
        for event in self._events(part):
            content, calls = pieces[-1]
            if isinstance(event, str):
                pieces[-1] = content + event, calls
                continue
            piece = self._piece(event)
            if any(other.index == piece.index for other in calls):
                pieces.append(("", []))
            pieces[-1][1].append(piece)
        return pieces

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
