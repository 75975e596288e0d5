"""Gives an answer in a chat its calls of tools, as OpenAI has them."""

from collections.abc import Iterable, Sequence
from typing import Any

from deployments.answers.parts import Part
from deployments.answers.schema import FunctionCall, FunctionPiece, ToolCall, ToolCallPiece
from deployments.answers.tool_call_parser import ToolParser
from deployments.requests.tool_fields import ToolUse
from deployments.tokenizers.tool_format import AnswerEvent, Arguments, CallStart, ToolFormat

Piece = tuple[str, list[ToolCallPiece]]  # content, and what is new of calls


def tool_parser(body: ToolUse, form: ToolFormat | None) -> ToolParser:
    """Of one answer to a request. form: of the model's calls."""
    if not body.offered_tools:
        return ToolParser(None)
    name = None if body.tool_choice is None else body.tool_choice.name
    return ToolParser(form, must_call=body.must_call, name=name)


class ToolCaller:
    """Of one answer, whole or in a stream."""

    def __init__(self, body: ToolUse, form: ToolFormat | None) -> None:
        """form: of the model's calls."""
        self._parser = tool_parser(body, form)
        self._count = 0

    def whole(self, part: Part) -> tuple[str, list[ToolCall]]:
        """The content and the calls of an answer."""
        content, calls = "", list[ToolCall]()
        for event in self._events(part):
            if isinstance(event, str):
                content += event
            elif isinstance(event, CallStart):
                function = FunctionCall(name=event.name, arguments="")
                calls.append(ToolCall(id=event.id, type="function", function=function))
            else:
                calls[-1].function.arguments += event.text
        return content, calls

    def pieces(self, part: Part) -> Sequence[Piece]:
        """What the answer's next part adds, one or more: a call's first piece comes before those of its arguments."""
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

    def told(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A choice's fields, with the reason why the answer ended if that is a call."""
        ended = self._parser.called and fields["finish_reason"] == "stop"
        return fields | {"finish_reason": "tool_calls"} if ended else fields

    def _events(self, part: Part) -> Iterable[AnswerEvent]:
        return self._parser.add(part.text, last=part.finish is not None)

    def _piece(self, event: CallStart | Arguments) -> ToolCallPiece:
        if isinstance(event, Arguments):
            return ToolCallPiece(index=self._count - 1, function=FunctionPiece(arguments=event.text))
        self._count += 1
        function = FunctionPiece(name=event.name, arguments="")
        return ToolCallPiece(index=self._count - 1, id=event.id, type="function", function=function)
