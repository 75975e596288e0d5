"""Separates tool calls from the content of a streamed answer. Text that may still become a call is held back.

Content and calls don't depend on how the text is split, so whole and streamed answers agree. Methods that may need
more text are generators: they yield until it arrives.
"""

import json
import re
from collections.abc import Generator, Sequence
from typing import Any

from deployments.apis.events import AnswerParser, Arguments, Call, Event, Text, overlap
from deployments.apis.formats import ToolFormat

_Wait = Generator[None, None, None]
_WaitText = Generator[None, None, str]

_SPACE = " \t\r\n"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG_BEGIN = re.compile("<")
_BETWEEN = _SPACE + ";,[]"  # between calls, in lists or with ";"
_ARGUMENTS = {"arguments", "parameters"}
# A character that is neither these nor a bracket or quote is no JSON: it ends a value that was never closed.
_NOT_SCALAR = re.compile(r"[^\w\s+\-.,:]")
_SCALAR_END = re.compile(r"[^\w+\-.]")
_STRING_PART_END = re.compile(r'["\\]')


class _NoCallError(Exception):
    """The text at the current position is not a call."""


class ToolCallParser(AnswerParser):
    """Parser of one answer. Text from `_emitted` to `_position` was read but not emitted."""

    def __init__(self, tool_format: ToolFormat | None, *, must_call: bool = False, name: str | None = None) -> None:
        """
        tool_format: the model's; None: there are no tools.
        must_call: the whole answer is JSON: a list of calls, or the arguments of the function `name`.
        """
        self._events: list[Event] = []
        self._text, self._position, self._emitted, self._has_ended = "", 0, 0, False
        self._in_arguments = False
        if name is not None:
            self._run = self._only_arguments(name)
        elif tool_format is None and not must_call:
            self._run = self._rest()
        elif tool_format == "hermes" and not must_call:
            self._run = self._tagged()
        else:
            self._run = self._bare(must_call=must_call)

    def add(self, text: str, *, last: bool) -> Sequence[Event]:
        self._text += text
        self._has_ended = last
        next(self._run, None)
        self._emit_arguments()
        events, self._events = self._events, []
        return events

    def _only_arguments(self, name: str) -> _Wait:
        """Read all text as the arguments of one function."""
        yield from self._peek()
        self._events.append(Call(name))
        self._in_arguments = True
        while (yield from self._peek()):
            self._position = len(self._text)

    def _bare(self, *, must_call: bool) -> _Wait:
        """Read calls at the beginning, then content. Where there must be a call, one that was cut off is no content."""
        yield from self._calls()
        if not must_call:
            yield from self._rest()

    def _rest(self) -> _Wait:
        while True:
            self._position = len(self._text)
            self._emit_content()
            if not (yield from self._peek()):
                return

    def _tagged(self) -> _Wait:
        """Read content and calls between tags. White space around calls is dropped."""
        while True:
            yield from self._content()
            if not (yield from self._peek()):
                self._emit_content()
                return
            self._position += len(_OPEN)
            if (yield from self._calls()):
                yield from self._leave()

    def _content(self) -> _Wait:
        """Read content up to the next tag or the end."""
        while True:
            tag = self._text.find(_OPEN, self._position)
            held_back = 0 if self._has_ended else overlap(self._text, _OPEN)
            self._position = tag if tag >= 0 else len(self._text) - held_back
            self._emit_content(keep=_SPACE)
            if tag >= 0 or self._has_ended:
                return
            yield

    def _leave(self) -> _Wait:
        """Read the closing tag and the white space after it, or stop at an opening tag."""
        while (yield from self._read_until(_TAG_BEGIN)):
            while len(self._text) < self._position + len(_CLOSE) and not self._has_ended:
                yield
            if self._text.startswith(_OPEN, self._position):
                break
            closes = self._text.startswith(_CLOSE, self._position)
            self._position += len(_CLOSE) if closes else 1
            if closes:
                yield from self._skip(_SPACE)
                break
        self._discard()

    def _emit_content(self, *, keep: str = "") -> None:
        """Emit what was read as content. keep: characters that are held back at its end."""
        content = self._text[self._emitted : self._position]
        content = content.rstrip(keep) if keep else content
        if content:
            self._events.append(Text(content))
        self._position -= self._emitted + len(content)
        self._text, self._emitted = self._text[self._emitted + len(content) :], 0

    def _emit_arguments(self) -> None:
        """Emit the arguments read so far. Call it when there is no more text for now."""
        if self._in_arguments and self._emitted < self._position:
            self._events.append(Arguments(self._text[self._emitted : self._position]))
            self._emitted = self._position

    def _discard(self) -> None:
        self._text, self._position, self._emitted = self._text[self._position :], 0, 0

    def _peek(self) -> _WaitText:
        """Return the next character without reading it; "" at the end."""
        while self._position >= len(self._text):
            if self._has_ended:
                return ""
            yield
        return self._text[self._position]

    def _skip(self, characters: str) -> _Wait:
        while (character := (yield from self._peek())) and character in characters:
            self._position += 1

    def _read_until(self, stops: re.Pattern[str]) -> _WaitText:
        """Read up to the next match of `stops`; return the match without reading it, or "" at the end."""
        while True:
            match = stops.search(self._text, self._position)
            self._position = match.start() if match else len(self._text)
            if match or self._has_ended:
                return match[0] if match else ""
            yield

    def _calls(self) -> Generator[None, None, bool]:
        """Read all consecutive calls; return whether there is any."""
        any_call = False
        while True:
            yield from self._skip(_BETWEEN)
            yield from self._peek()
            if any_call:
                self._discard()
            start = self._position
            try:
                yield from self._call()
            except _NoCallError:
                self._position = start
                return any_call
            any_call = True
            self._discard()

    def _call(self) -> _Wait:
        """Read an object with a name and perhaps arguments; raise _NoCallError before anything else was emitted."""
        yield from self._expect("{")
        name, arguments = "", "{}"
        while True:
            yield from self._skip(_SPACE + ",")
            if (yield from self._peek()) != '"':
                break
            key = json.loads((yield from self._json()))
            yield from self._skip(_SPACE + ":")
            if name and key in _ARGUMENTS and (yield from self._peek()) == "{":
                yield from self._stream_arguments(name)
                return
            value = yield from self._json()
            name = _name(json.loads(value)) if key == "name" else name
            arguments = value if key in _ARGUMENTS else arguments
        yield from self._expect("}")
        if not name:
            raise _NoCallError
        text = json.loads(arguments)
        self._events += [Call(name), Arguments(text if isinstance(text, str) else arguments)]

    def _stream_arguments(self, name: str) -> _Wait:
        """Emit the arguments as they stream. After name and "{" it counts as a call, whatever follows."""
        self._events.append(Call(name))
        self._emitted, self._in_arguments = self._position, True
        yield from self._value()
        self._emit_arguments()
        self._in_arguments = False
        yield from self._skip(_SPACE + ",")
        while (yield from self._peek()) == '"':  # other fields are ignored
            yield from self._string()
            yield from self._skip(_SPACE + ":")
            yield from self._value()
            yield from self._skip(_SPACE + ",")
        if (yield from self._peek()) == "}":
            self._position += 1

    def _expect(self, character: str) -> _Wait:
        if (yield from self._peek()) != character:
            raise _NoCallError
        self._position += 1

    def _json(self) -> _WaitText:
        """Read a whole value; return its text."""
        start = self._position
        yield from self._value()
        text = self._text[start : self._position]
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _NoCallError from error
        return text

    def _value(self) -> _Wait:
        """Read a value. Checks brackets and strings only, not that it is JSON."""
        first = yield from self._peek()
        if first == '"':
            yield from self._string()
        elif first not in "{[":
            yield from self._read_until(_SCALAR_END)
        else:
            yield from self._nested()

    def _nested(self) -> _Wait:
        depth = 0
        while (character := (yield from self._read_until(_NOT_SCALAR))) and character in '"{[}]':
            if character == '"':
                yield from self._string()
                continue
            self._position += 1
            depth += 1 if character in "{[" else -1
            if depth == 0:
                return

    def _string(self) -> _Wait:
        self._position += 1
        while (yield from self._read_until(_STRING_PART_END)) == "\\":
            self._position += 1
            yield from self._peek()
            self._position += 1
        self._position += 1


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _NoCallError
    return value
