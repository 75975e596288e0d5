"""Answers as items that follow each other, with typed events for each: what responses and messages share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from actors.coordinator.request import Delta, Request
from deployments.apis.choices import speculation_of
from deployments.apis.decoder import TokenDecoder
from deployments.apis.ensemble_details import EnsembleTally
from deployments.apis.events import Arguments, Call, End, Event, Reasoning, Text
from deployments.apis.parser import AnswerStream
from deployments.apis.parts import Choice, Part
from deployments.apis.writer import AnswerIdentity, Writer
from deployments.fields.generation import ConversationRequest
from deployments.strategies.panel import Outcome, Progress

ItemEvent = tuple[str, dict[str, Any]]  # type, other fields
Status = Literal["in_progress", "completed", "incomplete"]


class Item(ABC):
    """An item while it is generated."""

    content: ClassVar[type[Event]]  # events that it goes on with

    def __init__(self, index: int) -> None:
        """index: of the item in the answer."""
        self._index = index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def begin(self) -> Sequence[ItemEvent]: ...

    @abstractmethod
    def add(self, part: Part) -> Sequence[ItemEvent]:
        """Add text, with its tokens; return the events."""

    @abstractmethod
    def end(self, status: Status) -> Sequence[ItemEvent]: ...

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The item so far, as JSON."""


class ItemWriter(Writer):
    """Writes the deltas of one request as texts, reasoning and calls of tools."""

    def __init__(
        self, body: ConversationRequest, requests: Sequence[Request], decoder: TokenDecoder, *, identity: AnswerIdentity
    ) -> None:
        (request,) = requests
        self._body, self._decoder, self._identity = body, decoder, identity
        self._stream = AnswerStream(body, request.prompt, decoder, structured=body.structure is not None)
        by_token = body.logprob_count is not None or bool(body.return_token_details)
        self._choice = Choice(request, decoder, by_token=by_token, prompt_only=False)
        self._prompt_tokens = len(request.prompt)
        self._items: list[Item] = []
        self._pending: list[Part] = []  # parts whose text the parser still holds back
        self._ensembles = EnsembleTally([request], wanted=body.return_members is not False)

    def add(self, index: int, delta: Delta) -> str:
        part, _ = self._choice.add(delta)
        self._ensembles.add(index, delta)
        self._pending.append(part)
        return self._write([new for event in self._stream.add(part) for new in self._take(event)])

    def add_progress(self, index: int, event: Progress | Outcome) -> str:
        """Record an outcome. Progress has no event in these APIs."""
        if isinstance(event, Outcome):
            self._ensembles.conclude(index, event)
        return ""

    @abstractmethod
    def _item(self, event: Text | Reasoning | Call) -> Item:
        """Make the item that an event begins."""

    @abstractmethod
    def _write(self, events: Sequence[ItemEvent]) -> str: ...

    def _take(self, event: Event) -> Sequence[ItemEvent]:
        match event:
            case Text(text) | Reasoning(text):
                goes_on = bool(self._items) and isinstance(event, self._items[-1].content)
                return [*([] if goes_on else self._begin(event)), *self._extend(text)]
            case Call():
                self._pending.clear()
                return self._begin(event)
            case Arguments(text):
                return self._extend(text)
            case End(reason):
                return self._end("incomplete" if reason == "length" else "completed")

    def _begin(self, event: Text | Reasoning | Call) -> Sequence[ItemEvent]:
        """Begin an item and end the item before it."""
        ended = self._items[-1].end("completed") if self._items else []
        self._items.append(self._item(event))
        return [*ended, *self._items[-1].begin()]

    def _extend(self, text: str) -> Sequence[ItemEvent]:
        """Add text to the current item, with the tokens that have come since the last event."""
        part = replace(Part.joined(self._pending), text=text)
        self._pending.clear()
        return self._items[-1].add(part)

    def _end(self, status: Status) -> Sequence[ItemEvent]:
        return self._items[-1].end(status) if self._items else []

    def _extras(self) -> dict[str, Any]:
        """What this server adds to whole answers of these APIs."""
        detail = self._ensembles.detail(0)
        ensemble = {} if detail is None else {"ensemble": detail.model_dump(exclude_unset=True)}
        return {
            "speculation": speculation_of(self._choice.statistics).model_dump(),
            **ensemble,
            "seed": self._identity.seed,
        }
