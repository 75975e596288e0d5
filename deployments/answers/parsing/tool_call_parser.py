"""Separates tool calls from the content of a streamed answer. Text that may still become a call is held back.

Content and calls don't depend on how the text is split, so whole and streamed answers agree. Knows no JSON.
"""

import re
from collections.abc import Sequence

from deployments.answers.parsing.parser import AnswerParser
from deployments.answers.parsing.reasoning_parser import overlap
from deployments.answers.parsing.tool_call_reader import SPACE, ToolCallReader, Wait
from deployments.tokenizers.tool_format import AnswerEvent, CallStart, ToolFormat

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
