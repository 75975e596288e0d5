"""Reads calls of tools out of text that comes in pieces. Tells of a call, and of its arguments, as soon as it is one.

Methods that may need text which is not there yet are generators: they yield until it is. Knows no tags and no models.
"""

import json
import re
from collections.abc import Generator
from typing import Any

from deployments.tokenizers.tool_format import AnswerEvent, Arguments, CallStart

Wait = Generator[None, None, None]
WaitText = Generator[None, None, str]

SPACE = " \t\r\n"
_BETWEEN = SPACE + ";,[]"  # calls: in lists, or with ";" between
_ARGUMENTS = {"arguments", "parameters"}
# Outside of strings only these are JSON, so anything else ends a value that was never closed.
_NOT_SCALAR = re.compile(r"[^\w\s+\-.,:]")
_SCALAR_END = re.compile(r"[^\w+\-.]")
_STRING_PART_END = re.compile(r'["\\]')


class NoCallError(Exception):
    """What stands here is not a call."""


class CallReader:
    """A text as it comes. What was read and not told yet lies between `_told` and `_at`."""

    def __init__(self) -> None:
        self.events: list[AnswerEvent] = []
        self.called = False  # whether there was a call
        self._text, self._at, self._told, self._ended = "", 0, 0, False
        self._in_arguments = False

    def extend(self, text: str, *, last: bool) -> None:
        """More text; last: nothing comes after it."""
        self._text += text
        self._ended = last

    def tell_content(self, *, but: str = "") -> None:
        """What was read is content; any of the characters `but` at its end wait until it is known what follows."""
        content = self._text[self._told : self._at].rstrip(but) if but else self._text[self._told : self._at]
        if content:
            self.events.append(content)
        self._at -= self._told + len(content)
        self._text, self._told = self._text[self._told + len(content) :], 0

    def tell_arguments(self) -> None:
        """What was read of arguments is told at once; to be called when there is no more text."""
        if self._in_arguments and self._told < self._at:
            self.events.append(Arguments(self._text[self._told : self._at]))
            self._told = self._at

    def forget(self) -> None:
        """Drop what was read, told or not."""
        self._text, self._at, self._told = self._text[self._at :], 0, 0

    def next(self) -> WaitText:
        """The next character, which stays where it is; "" at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def skip(self, characters: str) -> Wait:
        """Past any of these."""
        while (character := (yield from self.next())) and character in characters:
            self._at += 1

    def until(self, stops: re.Pattern[str]) -> WaitText:
        """To the next of the characters that stop, which is returned and stays where it is; "" at the end."""
        while True:
            found = stops.search(self._text, self._at)
            self._at = found.start() if found else len(self._text)
            if found or self._ended:
                return found[0] if found else ""
            yield

    def calls(self) -> Generator[None, None, bool]:
        """All calls that follow one another here, and whether there is any; stops before what is none."""
        found = False
        while True:
            yield from self.skip(_BETWEEN)
            yield from self.next()
            if found:
                self.forget()
            start = self._at
            try:
                yield from self._call()
            except NoCallError:
                self._at = start
                return found
            self.called = found = True
            self.forget()

    def _call(self) -> Wait:
        """An object with a name, and with arguments if there are any.

        Raises:
            NoCallError: it is something else, and nothing was told of it.
        """
        yield from self._expect("{")
        name, arguments = "", "{}"
        while True:
            yield from self.skip(SPACE + ",")
            if (yield from self.next()) != '"':
                break
            key = json.loads((yield from self._json()))
            yield from self.skip(SPACE + ":")
            if name and key in _ARGUMENTS and (yield from self.next()) == "{":
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
        """Arguments after the name. From here on it is a call, whatever follows."""
        self.events.append(CallStart(name))
        self.called, self._told, self._in_arguments = True, self._at, True
        yield from self._value()
        self.tell_arguments()
        self._in_arguments = False
        yield from self.skip(SPACE + ",")
        while (yield from self.next()) == '"':  # fields that are of no interest
            yield from self._string()
            yield from self.skip(SPACE + ":")
            yield from self._value()
            yield from self.skip(SPACE + ",")
        if (yield from self.next()) == "}":
            self._at += 1

    def _expect(self, character: str) -> Wait:
        if (yield from self.next()) != character:
            raise NoCallError
        self._at += 1

    def _json(self) -> WaitText:
        """A whole value, as it is written."""
        start = self._at
        yield from self._value()
        text = self._text[start : self._at]
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise NoCallError from error
        return text

    def _value(self) -> Wait:
        """Past a value. Brackets and strings are looked at, and nothing else of whether it is JSON."""
        first = yield from self.next()
        if first == '"':
            yield from self._string()
        elif first not in "{[":
            yield from self.until(_SCALAR_END)
        else:
            yield from self._nested()

    def _nested(self) -> Wait:
        depth = 0
        while (character := (yield from self.until(_NOT_SCALAR))) and character in '"{[}]':
            if character == '"':
                yield from self._string()
                continue
            self._at += 1
            depth += 1 if character in "{[" else -1
            if depth == 0:
                return

    def _string(self) -> Wait:
        self._at += 1
        while (yield from self.until(_STRING_PART_END)) == "\\":
            self._at += 1
            yield from self.next()
            self._at += 1
        self._at += 1


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise NoCallError
    return value
