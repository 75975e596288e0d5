"""Gives an answer in a chat its calls of tools, as OpenAI has them."""

from typing import Any

from deployments.answers.parts import Part
from deployments.answers.responses import FunctionCall, ToolCall
from deployments.answers.tool_format import Call, ToolFormat
from deployments.answers.tool_parser import ToolParser
from deployments.requests.schema import ChatRequest


class ToolCaller:
    """Of one answer, whole or in a stream."""

    def __init__(self, body: ChatRequest, form: ToolFormat | None) -> None:
        """form: of the model's calls."""
        name = None if body.tool_choice is None else body.tool_choice.name
        self._parser = ToolParser(form, must_call=body.must_call, name=name) if body.offered_tools else None
        self._count = 0

    def add(self, part: Part, *, in_stream: bool) -> tuple[str, list[ToolCall]]:
        """The content and the calls of the answer's next part."""
        if self._parser is None:
            return part.text, []
        piece = self._parser.add(part.text, last=part.finish is not None)
        return piece.content, [self._tell(call, in_stream=in_stream) for call in piece.calls]

    def told(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A choice's fields, with the reason why the answer ended if that is a call."""
        called = self._parser is not None and self._parser.called
        return fields | {"finish_reason": "tool_calls"} if called and fields["finish_reason"] == "stop" else fields

    def _tell(self, call: Call, *, in_stream: bool) -> ToolCall:
        told = ToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
        if in_stream:
            told.index = self._count
        self._count += 1
        return told
