"""Where each piece of a streamed text came from, by the token details that the server sends with it."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that came in one way: accepted, recovered, bonus or plain. "": the server did not say."""

    text: str
    source: str


class Attribution:
    """Matches the tokens of one answer with its text, which may come later: the server holds unfinished text back."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # tokens by source
        self._pending: deque[Piece] = deque()

    def pieces(self, text: str, details: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """The next text, cut where its source changes. Where tokens and text don't match, the text has none."""
        for detail in details:
            self.counts[detail["source"]] += 1
            self._pending.append(Piece(detail["text"], detail["source"]))
        found: list[Piece] = []
        while text and self._pending:
            token = self._pending.popleft()
            if token.text.startswith(text):
                self._pending.appendleft(Piece(token.text[len(text) :], token.source))
                found.append(Piece(text, token.source))
                return found
            if not text.startswith(token.text):
                self._pending.clear()  # half a character, or text that a stop string cut
                break
            text = text[len(token.text) :]
            found.append(token)
        return [*found, Piece(text, "")] if text else found
