"""Separates tool calls from the content of a streamed answer. Text that may still become a call is held back.

Content and calls don't depend on how the text is split, so whole and streamed answers agree. Methods that may need
more text are generators: they yield until it arrives.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.apis.formats import ToolFormat


@dataclass(frozen=True, slots=True)
class CallStart:
    """Begin of a call. Its arguments follow as `Arguments` events."""

    name: str
    # Mistral requires nine letters and digits.
    id: str = field(default_factory=lambda: f"call{secrets.token_hex(3)[:5]}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Next piece of the JSON arguments of the latest call, as the model wrote it."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Next piece of what the model writes before its answer."""

    text: str


AnswerEvent = str | Reasoning | CallStart | Arguments  # str: content


class AnswerParser(ABC):
    """Parser of one answer. Its events don't depend on how the text is split, except for where pieces end."""

    has_called: bool

    @abstractmethod
    def add(self, text: str, *, last: bool) -> Sequence[AnswerEvent]:
        """Add text; return the new events. last: no more text follows."""


Wait = Generator[None, None, None]
WaitText = Generator[None, None, str]

SPACE = " \t\r\n"
_BETWEEN = SPACE + ";,[]"  # between calls, in lists or with ";"
_ARGUMENTS = {"arguments", "parameters"}
# A character that is neither these nor a bracket or quote is no JSON: it ends a value that was never closed.
_NOT_SCALAR = re.compile(r"[^\w\s+\-.,:]")
_SCALAR_END = re.compile(r"[^\w+\-.]")
_STRING_PART_END = re.compile(r'["\\]')


class NoCallError(Exception):
    """The text at the current position is not a call."""


class ToolCallReader:
    """Reader of streamed text. Text from `_emitted` to `_position` was read but not emitted."""

    def __init__(self) -> None:
        self.events: list[AnswerEvent] = []
        self.has_called = False
        self._text, self._position, self._emitted, self._has_ended = "", 0, 0, False
        self._in_arguments = False

    def extend(self, text: str, *, last: bool) -> None:
        """Append text. last: no more follows."""
        self._text += text
        self._has_ended = last

    def emit_content(self, *, keep: str = "") -> None:
        """Emit what was read as content. keep: characters that are held back at its end."""
        content = self._text[self._emitted : self._position]
        content = content.rstrip(keep) if keep else content
        if content:
            self.events.append(content)
        self._position -= self._emitted + len(content)
        self._text, self._emitted = self._text[self._emitted + len(content) :], 0

    def emit_arguments(self) -> None:
        """Emit the arguments read so far. Call it when there is no more text for now."""
        if self._in_arguments and self._emitted < self._position:
            self.events.append(Arguments(self._text[self._emitted : self._position]))
            self._emitted = self._position

    def discard(self) -> None:
        """Drop what was read, emitted or not."""
        self._text, self._position, self._emitted = self._text[self._position :], 0, 0

    def peek(self) -> WaitText:
        """Return the next character without reading it; "" at the end."""
        while self._position >= len(self._text):
            if self._has_ended:
                return ""
            yield
        return self._text[self._position]

    def skip(self, characters: str) -> Wait:
        """Read any of these characters."""
        while (character := (yield from self.peek())) and character in characters:
            self._position += 1

    def read_until(self, stops: re.Pattern[str]) -> WaitText:
        """Read up to the next match of `stops`; return the match without reading it, or "" at the end."""
        while True:
            match = stops.search(self._text, self._position)
            self._position = match.start() if match else len(self._text)
            if match or self._has_ended:
                return match[0] if match else ""
            yield

    def calls(self) -> Generator[None, None, bool]:
        """Read all consecutive calls; return whether there is any."""
        any_call = False
        while True:
            yield from self.skip(_BETWEEN)
            yield from self.peek()
            if any_call:
                self.discard()
            start = self._position
            try:
                yield from self._call()
            except NoCallError:
                self._position = start
                return any_call
            self.has_called = any_call = True
            self.discard()

    def _call(self) -> Wait:
        """Read an object with a name and perhaps arguments.

        Raises:
            NoCallError: it is something else; nothing was emitted.
        """
        yield from self._expect("{")
        name, arguments = "", "{}"
        while True:
            yield from self.skip(SPACE + ",")
            if (yield from self.peek()) != '"':
                break
            key = json.loads((yield from self._json()))
            yield from self.skip(SPACE + ":")
            if name and key in _ARGUMENTS and (yield from self.peek()) == "{":
                yield from self._stream_arguments(name)
                return
            value = yield from self._json()
            name = _name(json.loads(value)) if key == "name" else name
            arguments = value if key in _ARGUMENTS else arguments
        yield from self._expect("}")
        if not name:
            raise NoCallError
        text = json.loads(arguments)
        self.events += [CallStart(name), Arguments(text if isinstance(text, str) else arguments)]

    def _stream_arguments(self, name: str) -> Wait:
        """Emit the arguments as they stream. After name and "{" it counts as a call, whatever follows."""
        self.events.append(CallStart(name))
        self.has_called, self._emitted, self._in_arguments = True, self._position, True
        yield from self._value()
        self.emit_arguments()
        self._in_arguments = False
        yield from self.skip(SPACE + ",")
        while (yield from self.peek()) == '"':  # other fields are ignored
            yield from self._string()
            yield from self.skip(SPACE + ":")
            yield from self._value()
            yield from self.skip(SPACE + ",")
        if (yield from self.peek()) == "}":
            self._position += 1

    def _expect(self, character: str) -> Wait:
        if (yield from self.peek()) != character:
            raise NoCallError
        self._position += 1

    def _json(self) -> WaitText:
        """Read a whole value; return its text."""
        start = self._position
        yield from self._value()
        text = self._text[start : self._position]
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise NoCallError from error
        return text

    def _value(self) -> Wait:
        """Read a value. Checks brackets and strings only, not that it is JSON."""
        first = yield from self.peek()
        if first == '"':
            yield from self._string()
        elif first not in "{[":
            yield from self.read_until(_SCALAR_END)
        else:
            yield from self._nested()

    def _nested(self) -> Wait:
        depth = 0
        while (character := (yield from self.read_until(_NOT_SCALAR))) and character in '"{[}]':
            if character == '"':
                yield from self._string()
                continue
            self._position += 1
            depth += 1 if character in "{[" else -1
            if depth == 0:
                return

    def _string(self) -> Wait:
        self._position += 1
        while (yield from self.read_until(_STRING_PART_END)) == "\\":
            self._position += 1
            yield from self.peek()
            self._position += 1
        self._position += 1


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise NoCallError
    return value


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text that is a beginning of the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG_BEGIN = re.compile("<")


class ToolCallParser(ToolCallReader, AnswerParser):
    """Parser of one answer."""

    def __init__(self, tool_format: ToolFormat | None, *, must_call: bool = False, name: str | None = None) -> None:
        """
        tool_format: the model's; None: there are no tools.
        must_call: the whole answer is JSON: a list of calls, or the arguments of the function `name`.
        """
        super().__init__()
        if name is not None:
            self._run = self._only_arguments(name)
        elif tool_format is None and not must_call:
            self._run = self._rest()
        elif tool_format == "hermes" and not must_call:
            self._run = self._tagged()
        else:
            self._run = self._bare()

    def add(self, text: str, *, last: bool) -> Sequence[AnswerEvent]:
        """Add text; return the new events. last: no more text follows."""
        self.extend(text, last=last)
        next(self._run, None)
        self.emit_arguments()
        events, self.events = self.events, []
        return events

    def _only_arguments(self, name: str) -> Wait:
        """Read all text as the arguments of one function."""
        yield from self.peek()
        self.events.append(CallStart(name))
        self.has_called = self._in_arguments = True
        while (yield from self.peek()):
            self._position = len(self._text)

    def _bare(self) -> Wait:
        """Read calls at the beginning, then content."""
        yield from self.calls()
        yield from self._rest()

    def _rest(self) -> Wait:
        """Read content to the end."""
        while True:
            self._position = len(self._text)
            self.emit_content()
            if not (yield from self.peek()):
                return

    def _tagged(self) -> Wait:
        """Read content and calls between tags. White space around calls is dropped."""
        while True:
            yield from self._content()
            if not (yield from self.peek()):
                self.emit_content()
                return
            self._position += len(_OPEN)
            if (yield from self.calls()):
                yield from self._leave()

    def _content(self) -> Wait:
        """Read content up to the next tag or the end."""
        while True:
            tag = self._text.find(_OPEN, self._position)
            held_back = 0 if self._has_ended else overlap(self._text, _OPEN)
            self._position = tag if tag >= 0 else len(self._text) - held_back
            self.emit_content(keep=SPACE)
            if tag >= 0 or self._has_ended:
                return
            yield

    def _leave(self) -> Wait:
        """Read the closing tag and the white space after it, or stop at an opening tag."""
        while (yield from self.read_until(_TAG_BEGIN)):
            while len(self._text) < self._position + len(_CLOSE) and not self._has_ended:
                yield
            if self._text.startswith(_OPEN, self._position):
                break
            closes = self._text.startswith(_CLOSE, self._position)
            self._position += len(_CLOSE) if closes else 1
            if closes:
                yield from self.skip(SPACE)
                break
        self.discard()
