"""Match streamed text with the sources of its tokens, which the server sends with it."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Text with one source: accepted, ngram, medusa, eagle3, recovered, bonus, plain, or "" if unknown.

    Accepted are a drafter's tokens; those of other proposers go by their names.
    """

    text: str
    source: str


class Attribution:
    """Matches the tokens of one answer with its text, which may come later than they do."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # tokens by source
        self._pending: deque[TextSpan] = deque()

    def split(self, text: str, details: Sequence[Mapping[str, Any]]) -> list[TextSpan]:
        """Split the next text where its source changes. If tokens and text don't match, the source is ""."""
        for detail in details:
            proposer = detail.get("proposer")
            source = detail["source"] if proposer in (None, "drafter") else proposer
            self.counts[source] += 1
            self._pending.append(TextSpan(detail["text"], source))
        spans: list[TextSpan] = []
        while text and self._pending:
            token = self._pending.popleft()
            if token.text.startswith(text):
                self._pending.appendleft(TextSpan(token.text[len(text) :], token.source))
                spans.append(TextSpan(text, token.source))
                return spans
            if not text.startswith(token.text):
                self._pending.clear()  # part of a character, or text cut by a stop string
                break
            text = text[len(token.text) :]
            spans.append(token)
        return [*spans, TextSpan(text, "")] if text else spans
