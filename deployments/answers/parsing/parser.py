"""Interface of what splits an answer into reasoning, content and calls. Knows no syntax."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from deployments.tokenizers.tool_format import AnswerEvent


class AnswerParser(ABC):
    """Parser of one answer. Its events don't depend on how the text is split, except for where pieces end."""

    has_called: bool

    @abstractmethod
    def add(self, text: str, *, last: bool) -> Sequence[AnswerEvent]:
        """Add text; return the new events. last: no more text follows."""
