"""Parses the text of an answer once, by the model's formats and the request, for the writers of all APIs."""

from collections.abc import Sequence
from typing import Literal

from deployments.apis.decoder import TokenDecoder
from deployments.apis.events import AnswerParser, Call, End, Event, Reasoning, overlap
from deployments.apis.formats import THINK_CLOSE, THINK_OPEN
from deployments.apis.parts import Part
from deployments.apis.tool_calls import ToolCallParser
from deployments.fields.conversation import ToolUse

_PROMPT_END = 16  # tokens; enough for a tag and the white space around it


class AnswerStream:
    """One answer: parts in, events out."""

    def __init__(self, body: ToolUse, prompt: Sequence[int], decoder: TokenDecoder, *, structured: bool) -> None:
        """structured: the answer follows a grammar from its first token on, so it has no reasoning."""
        self._parser = _parser(body, prompt, decoder, structured=structured)
        self._has_called = False

    def add(self, part: Part) -> Sequence[Event]:
        """Return the events that a part adds; the last part's end with `End`."""
        events = list(self._parser.add(part.text, last=part.finish is not None))
        self._has_called = self._has_called or any(isinstance(event, Call) for event in events)
        if part.finish is not None:
            events.append(End("calls" if self._has_called and part.finish == "stop" else part.finish))
        return events


def _parser(body: ToolUse, prompt: Sequence[int], decoder: TokenDecoder, *, structured: bool) -> AnswerParser:
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


class ReasoningParser(AnswerParser):
    """Tells reasoning between `<think>` tags from what follows. White space around the tags is dropped.

    Reasoning that never ends is reasoning.
    """

    def __init__(self, rest: AnswerParser, *, has_begun: bool) -> None:
        """
        rest: parser of what follows the reasoning.
        has_begun: whether the prompt ends with the opening tag.
        """
        self._rest = rest
        self._part: Literal["begin", "reasoning", "gap", "rest"] = "reasoning" if has_begun else "begin"
        self._text, self._is_blank = "", True  # text not emitted; whether no reasoning was

    def add(self, text: str, *, last: bool) -> Sequence[Event]:
        self._text += text
        events: list[Event] = []
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
        return events

    def _begin(self, *, last: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(THINK_OPEN):
            self._part, self._text = "reasoning", text.removeprefix(THINK_OPEN)
        elif last or not THINK_OPEN.startswith(text):
            self._part = "rest"

    def _reason(self, *, last: bool) -> Sequence[Event]:
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
