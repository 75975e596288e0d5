"""Parses the text of an answer once, by the model's formats and the request, for the writers of all APIs."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from deployments.apis.decoder import TokenDecoder
from deployments.apis.events import AnswerParser, Arguments, Call, End, Event, Reasoning, Text, overlap
from deployments.apis.formats import THINK_CLOSE, THINK_OPEN
from deployments.apis.parts import Part
from deployments.apis.tool_calls import ToolCallParser
from deployments.fields.conversation import ToolUse

_PROMPT_END = 16  # tokens; enough for a tag and the white space around it
_CALLS = "tool_calls"
_CONTENT = "content"
_REASONING = {"reasoning_content", "reasoning", "thinking"}  # names that templates in use have


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


class TemplateParser(AnswerParser):
    """Parser of one answer. Calls come whole, when they end; a call that can't be read is content."""

    def __init__(
        self, template: ResponseTemplate, prompt: str, tools: Sequence[dict[str, Any]], *, reads_calls: bool
    ) -> None:
        """
        prompt: its text with special tokens; it may begin the answer, for example with an opening tag.
        tools: for the types of arguments, as chat templates take them.
        reads_calls: false: what looks like a call is content.
        """
        prefix = prompt if template.start_anchor_re.search(prompt) else ""
        self._parser = _Parser(template, prefix=prefix, tools=list(tools))
        self._template, self._reads_calls = template, reads_calls
        self._region, self._pending = "", ""  # open region's text: all of it, and white space at its end
        self._has_text = {_CONTENT: False}  # by field, whether it has text
        self._is_new = True  # whether the region has no text yet

    def add(self, text: str, *, last: bool) -> Sequence[Event]:
        events = self._parser.feed(text)
        if last:
            events += self._parser.finalize()[1]
        return [new for event in events for new in self._read(event)]

    def _read(self, event: dict[str, Any]) -> Iterator[Event]:
        name = event["field"]
        match event["type"]:
            case "region_open":
                self._region, self._pending, self._is_new = "", "", True
            case "region_chunk":
                self._region += event["text"]
                if not event["dirty"] and name != _CALLS:
                    yield from self._text(name, event["text"])
            case "region_close" if name == _CALLS:
                yield from self._calls(event["value"])

    def _text(self, name: str, chunk: str) -> Iterator[Event]:
        """Emit text of a region without the white space around it."""
        text = self._pending + chunk
        text = text.lstrip() if self._is_new else text
        visible = text.rstrip()
        self._pending = text[len(visible) :]
        if not visible or (name != _CONTENT and name not in _REASONING):
            return
        if self._is_new and self._has_text.get(name):
            visible = (self._template.fields[name].join or "") + visible
        self._has_text[name], self._is_new = True, False
        yield Text(visible) if name == _CONTENT else Reasoning(visible)

    def _calls(self, value: Any) -> Iterator[Event]:
        calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
        if not self._reads_calls or None in calls:
            self._has_text[_CONTENT] = True
            yield Text(self._region)
            return
        for start, arguments in filter(None, calls):
            yield start
            yield arguments


class _Parser(ResponseParser):
    """Transformers' parser, which goes on after a region that it can't read. Such a region closes without a value."""

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        try:
            super()._close_current(events)
        except (ValueError, KeyError):
            events.append({"type": "region_close", "field": self._current, "value": None})
            self._reset_to_implicit()


def _call(value: Any) -> tuple[Call, Arguments] | None:
    """Read a call as chat templates have it; None: it is none."""
    match value:
        case {"function": {"name": str(name), **rest}} | {"name": str(name), **rest} if name:
            arguments = rest.get("arguments", rest.get("parameters", {}))
        case _:
            return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(name), Arguments(text)
