"""Splits the text of an answer into reasoning, content and tool calls, by the model's formats and the request."""

from collections.abc import Sequence
from typing import Literal

from deployments.apis.decoder import TokenDecoder
from deployments.apis.formats import THINK_CLOSE, THINK_OPEN
from deployments.apis.tool_calls import AnswerEvent, AnswerParser, Reasoning, ToolCallParser, overlap
from deployments.fields.conversation import ToolUse


class ReasoningParser(AnswerParser):
    """Parser of one answer. White space around the tags is dropped; reasoning that never ends is reasoning."""

    def __init__(self, rest: AnswerParser, *, has_begun: bool) -> None:
        """
        rest: parser of what follows the reasoning.
        has_begun: whether the prompt ends with the opening tag.
        """
        self._rest = rest
        self._part: Literal["begin", "reasoning", "gap", "rest"] = "reasoning" if has_begun else "begin"
        self.has_called = False
        self._text, self._is_blank = "", True  # text not emitted; whether no reasoning was

    def add(self, text: str, *, last: bool) -> Sequence[AnswerEvent]:
        self._text += text
        events: list[AnswerEvent] = []
        if self._part == "begin":
            self._begin(last=last)
        if self._part == "reasoning":
            events += self._reason(last=last)
        if self._part == "gap":
            self._text = self._text.lstrip()
            self._part = "rest" if self._text or last else "gap"
        if self._part == "rest":
            events += self._rest.add(self._text, last=last)
            self._text = ""
            self.has_called = self._rest.has_called
        return events

    def _begin(self, *, last: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(THINK_OPEN):
            self._part, self._text = "reasoning", text.removeprefix(THINK_OPEN)
        elif last or not THINK_OPEN.startswith(text):
            self._part = "rest"

    def _reason(self, *, last: bool) -> Sequence[AnswerEvent]:
        text = self._text.lstrip() if self._is_blank else self._text
        reasoning, tag, after = text.partition(THINK_CLOSE)
        held_back = "" if tag or last else text[len(text) - overlap(text, THINK_CLOSE) :]
        reasoning = reasoning.removesuffix(held_back).rstrip()
        self._text = after if tag else text[len(reasoning) :]
        self._part = "gap" if tag else "reasoning"
        if not reasoning:
            return []
        self._is_blank = False
        return [Reasoning(reasoning)]


_PROMPT_END = 16  # tokens; enough for a tag and the white space around it


def make_parser(body: ToolUse, prompt: Sequence[int], decoder: TokenDecoder, *, structured: bool) -> AnswerParser:
    """Parser of one answer to the request. structured: the answer follows a grammar from its first token on."""
    tools = body.offered_tools
    if decoder.response_template is not None and not structured:
        # Only here, since older releases of transformers lack what it imports.
        from deployments.apis.template_parser import TemplateParser

        text = decoder.decode_with_special(list(prompt))
        schemas = [tool.model_dump(exclude_none=True) for tool in tools]
        return TemplateParser(decoder.response_template, text, schemas, reads_calls=bool(tools))
    if tools:
        name = None if body.tool_choice is None else body.tool_choice.name
        calls = ToolCallParser(decoder.tool_format, must_call=body.must_call, name=name)
    else:
        calls = ToolCallParser(None)
    if not decoder.has_think_tags or structured:
        return calls
    end = decoder.decode_with_special(list(prompt[-_PROMPT_END:]))
    return ReasoningParser(calls, has_begun=end.rstrip().endswith(THINK_OPEN))
