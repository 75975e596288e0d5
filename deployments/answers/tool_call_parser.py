"""Tells calls of tools from the rest of an answer, while it streams. Text that can still become a call is held back.

What is told does not depend on the pieces in which the text comes, so an answer is the same whole and in a stream.
"""

import re
from collections.abc import Sequence

from deployments.answers.tool_call_reader import SPACE, CallReader, Wait
from deployments.tokenizers.tool_format import AnswerEvent, CallStart, ToolFormat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG_BEGIN = re.compile("<")


class ToolParser(CallReader):
    """Of one answer."""

    def __init__(self, form: ToolFormat | None, *, must_call: bool = False, name: str | None = None) -> None:
        """
        form: the model's; None: there are no tools.
        must_call: the answer is nothing but JSON: a list of calls, or the arguments of the function `name`.
        """
        super().__init__()
        if name is not None:
            self._run = self._arguments_of(name)
        elif form is None and not must_call:
            self._run = self._rest()
        elif form == "hermes" and not must_call:
            self._run = self._tagged()
        else:
            self._run = self._bare()

    def add(self, text: str, *, last: bool) -> Sequence[AnswerEvent]:
        """What the next text adds; last: nothing comes after it."""
        self.extend(text, last=last)
        next(self._run, None)
        self.tell_arguments()
        events, self.events = self.events, []
        return events

    def _arguments_of(self, name: str) -> Wait:
        """All of it is the arguments of one function."""
        yield from self.next()
        self.events.append(CallStart(name))
        self.called = self._in_arguments = True
        while (yield from self.next()):
            self._at = len(self._text)

    def _bare(self) -> Wait:
        """Calls stand at the beginning, or there are none."""
        yield from self.calls()
        yield from self._rest()

    def _rest(self) -> Wait:
        """Content to the end."""
        while True:
            self._at = len(self._text)
            self.tell_content()
            if not (yield from self.next()):
                return

    def _tagged(self) -> Wait:
        """Calls stand between tags. White space around them is no content."""
        while True:
            yield from self._content()
            if not (yield from self.next()):
                self.tell_content()
                return
            self._at += len(_OPEN)
            if (yield from self.calls()):
                yield from self._leave()

    def _content(self) -> Wait:
        """To the next tag, or to the end."""
        while True:
            tag = self._text.find(_OPEN, self._at)
            self._at = tag if tag >= 0 else len(self._text) - (0 if self._ended else _overlap(self._text, _OPEN))
            self.tell_content(but=SPACE)
            if tag >= 0 or self._ended:
                return
            yield

    def _leave(self) -> Wait:
        """Past the closing tag and white space after it, or to where another call begins without one."""
        while (yield from self.until(_TAG_BEGIN)):
            while len(self._text) < self._at + len(_CLOSE) and not self._ended:
                yield
            if self._text.startswith(_OPEN, self._at):
                break
            closes = self._text.startswith(_CLOSE, self._at)
            self._at += len(_CLOSE) if closes else 1
            if closes:
                yield from self.skip(SPACE)
                break
        self.forget()


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of the text could begin the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
