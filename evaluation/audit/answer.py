"""Answers of OpenAI's two APIs, whole or put together from a stream's chunks, in one form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ToolCall:
    """A call of a function. `ids` has one per chunk that names it."""

    ids: set[str] = field(default_factory=set)
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One answer to a prompt. The last four have an entry for each token, if they were asked for."""

    text: str = ""
    reasoning: str = ""
    finishes: list[str] = field(default_factory=list)  # one, unless the server errs
    calls: dict[int, ToolCall] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[list[float]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    @property
    def finish(self) -> str:
        return " and ".join(self.finishes) or "none"

    @property
    def shown(self) -> str:
        """All that a reader sees, for comparisons."""
        calls = "".join(f"\n{call.name}({call.arguments})" for call in self.calls.values())
        return f"{self.reasoning}{self.text}{calls}"

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a choice of a whole answer, or of a chunk."""
        message = part.get("message") or part.get("delta") or {}
        self.text += part.get("text") or message.get("content") or ""
        self.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
        if reason := part.get("finish_reason"):
            self.finishes.append(reason)
        for position, piece in enumerate(message.get("tool_calls") or ()):
            call = self.calls.setdefault(piece.get("index", position), ToolCall())
            function = piece.get("function") or {}
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""
            call.ids |= {piece["id"]} if piece.get("id") else set()
        self.ids += part.get("token_ids") or [detail["id"] for detail in part.get("token_details") or ()]
        for token, logprob, tops in _log_probabilities(part.get("logprobs") or {}):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.tops.append(tops)


@dataclass(slots=True)
class Answer:
    """The choices of an answer, in order, its usage and its form."""

    choices: list[Choice]
    usage: dict[str, Any]
    ids: set[str]  # one, unless the server errs
    ended: bool  # a stream had its [DONE]
    error: object = None  # in a stream

    @property
    def first(self) -> Choice:
        return self.choices[0]


def collect(documents: Sequence[Mapping[str, Any]], *, ended: bool = True) -> Answer:
    """Put together the chunks of a stream, or the one document of a whole answer."""
    choices: dict[int, Choice] = {}
    usage: dict[str, Any] = {}
    for document in documents:
        usage = document.get("usage") or usage
        for part in document.get("choices") or ():
            choices.setdefault(part.get("index", 0), Choice()).add(part)
    ids = {str(document.get("id", "")) for document in documents}
    error = next((document["error"] for document in documents if document.get("error")), None)
    return Answer([choices[index] for index in sorted(choices)] or [Choice()], usage, ids, ended, error)


def _log_probabilities(logprobs: Mapping[str, Any]) -> Iterator[tuple[str, float | None, list[float]]]:
    """Yield each token, its log-probability and those of the most probable, from the form of either API."""
    for entry in logprobs.get("content") or ():
        yield entry["token"], entry["logprob"], [top["logprob"] for top in entry.get("top_logprobs") or ()]
    tokens = logprobs.get("tokens") or ()
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    for token, logprob, top in zip(tokens, logprobs.get("token_logprobs") or (), tops, strict=True):
        yield token, logprob, list((top or {}).values())
