"""Separates reasoning between `<think>` tags from the answer after it. Knows no tool calls."""

from collections.abc import Sequence
from typing import Literal

from deployments.answers.parsing.parser import AnswerParser
from deployments.tokenizers.tool_format import THINK_CLOSE, THINK_OPEN, AnswerEvent, Reasoning


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


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text that is a beginning of the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
