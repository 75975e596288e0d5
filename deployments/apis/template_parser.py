"""Parses an answer by a response template, with transformers' parser."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from deployments.apis.events import AnswerParser, Arguments, Call, Event, Reasoning, Text

_CALLS = "tool_calls"
_CONTENT = "content"
_REASONING = {"reasoning_content", "reasoning", "thinking"}  # names that templates in use have


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
