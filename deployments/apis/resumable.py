"""Ids of a stream's events, by which a repeated request goes on after the last one.

An id holds what the answer depends on beyond the request, and a position in it: for each choice the tokens and
characters so far, and how many events came after that. A replay yields the same tokens, batched differently. So a
delta that crosses the position is split there, and what lies before it is left out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.coordinator.request import Delta
from decoding.errors import InvalidRequestError
from deployments.apis.writer import AnswerIdentity, Writer
from deployments.fields.generation import GenerationRequest
from deployments.strategies.panel import Outcome, Progress

LAST_EVENT_ID = "Last-Event-ID"
NO_EVENT = "0"  # from a client that wants ids and has no event yet
_MAX_LENGTH = 4096
_ID = re.compile(
    r"([0-9a-f]{24})\.([0-9a-f]{1,12})\.([0-9a-f]{1,16})/((?:\d{1,9}:\d{1,9}e?,)*\d{1,9}:\d{1,9}e?)\+(\d{1,6})"
)
_CHOICE = re.compile(r"(\d+):(\d+)(e?)")


@dataclass(frozen=True, slots=True, order=True)
class ChoicePosition:
    """How much of one choice came before."""

    tokens: int = 0
    characters: int = 0
    has_ended: bool = False

    def __str__(self) -> str:
        return f"{self.tokens}:{self.characters}{'e' if self.has_ended else ''}"

    def after(self, delta: Delta) -> "ChoicePosition":
        return ChoicePosition(
            self.tokens + len(delta.tokens), self.characters + len(delta.text), delta.finish is not None
        )


@dataclass(frozen=True, slots=True)
class EventId:
    """The id of one event."""

    identity: AnswerIdentity
    choices: Sequence[ChoicePosition]
    events: int = 0  # that came after this position

    def __str__(self) -> str:
        return f"{self.identity}/{','.join(map(str, self.choices))}+{self.events}"

    @staticmethod
    def parse(text: str) -> "EventId":
        """Read an id; raises InvalidRequestError if it is none."""
        match = _ID.fullmatch(text) if len(text) <= _MAX_LENGTH else None
        if match is None:
            raise InvalidRequestError(
                f"{LAST_EVENT_ID}: should be the id of an event of this server", field=LAST_EVENT_ID
            )
        answer_id, created, seed, choices, events = match.groups()
        positions = [
            ChoicePosition(int(tokens), int(characters), bool(ended))
            for tokens, characters, ended in _CHOICE.findall(choices)
        ]
        return EventId(AnswerIdentity(answer_id, int(created, 16), int(seed, 16)), positions, int(events))


def last_event(header: str | None, body: GenerationRequest, *, resumable: bool) -> EventId | None:
    """Return the last event that the client has; None: it has none. Raises InvalidRequestError if it is no such id."""
    if header in (None, NO_EVENT):
        return None
    if not resumable:
        raise InvalidRequestError(f"{LAST_EVENT_ID}: this answer can't go on after an event", field=LAST_EVENT_ID)
    event = EventId.parse(header)
    if body.seed is not None and body.seed_or_new() != event.identity.seed and body.seed != -1:
        raise InvalidRequestError(
            f"{LAST_EVENT_ID}: is of a request with the seed {event.identity.seed}", field=LAST_EVENT_ID
        )
    return event


class ResumableWriter(Writer):
    """Gives the events of another writer their ids, and leaves out those that the client has."""

    def __init__(self, writer: Writer, identity: AnswerIdentity, choices: int, after: EventId | None) -> None:
        """
        writer: its events depend on the tokens alone, not on how they come.
        after: the last event that the client has; None: it has none. Another number of choices is an error.
        """
        if after is not None and len(after.choices) != choices:
            raise InvalidRequestError(
                f"{LAST_EVENT_ID}: is of a request with {len(after.choices)} choices", field=LAST_EVENT_ID
            )
        self._writer, self._identity = writer, identity
        start = [ChoicePosition()] * choices
        self._wanted = list(start if after is None else after.choices)  # positions that the client has
        self._made = start  # positions that were made again so far
        self._sent = EventId(identity, self._wanted, 0)
        self._skipped = 0 if after is None else after.events  # events still to leave out after the position

    def begin(self) -> str:
        events = self._writer.begin()
        return self._number(events) if self._made == self._wanted else ""

    def add(self, index: int, delta: Delta) -> str:
        old, new = self._split(index, delta)
        if old is not None:
            self._writer.add(index, old)
            self._made[index] = self._made[index].after(old)
        if new is None:
            return ""
        events = self._writer.add(index, new)
        self._made[index] = self._made[index].after(new)
        return self._number(events, arrived=True)

    def add_progress(self, index: int, event: Progress | Outcome) -> str:
        return self._writer.add_progress(index, event)

    def end(self) -> str:
        return self._number(self._writer.end())

    def fail(self, error: Exception) -> str:
        """Return the error's event. It has no id, so that a client's last id stays that of its last text."""
        return self._writer.fail(error)

    def whole(self) -> dict[str, Any]:
        return self._writer.whole()

    def _split(self, index: int, delta: Delta) -> tuple[Delta | None, Delta | None]:
        """Return what of the delta the client has, and what it has not."""
        made, wanted = self._made[index], self._wanted[index]
        if wanted.has_ended:
            return delta, None
        tokens, characters = wanted.tokens - made.tokens, wanted.characters - made.characters
        if tokens <= 0 and characters <= 0:
            return None, delta
        if tokens >= len(delta.tokens) and characters >= len(delta.text) and delta.finish is None:
            return delta, None
        return _first(delta, tokens, characters), _rest(delta, tokens, characters)

    def _number(self, events: str, *, arrived: bool = False) -> str:
        """Give the events their ids. arrived: the last of them reaches the position made so far."""
        numbered = []
        parts = events.split("\n\n")[:-1]
        for number, part in enumerate(parts, 1):
            if arrived and number == len(parts):
                self._sent = EventId(self._identity, self._position(), 0)
            else:
                self._sent = replace(self._sent, events=self._sent.events + 1)
            if self._skipped:
                self._skipped -= 1
                continue
            numbered.append(f"id: {self._sent}\n{part}\n\n")
        return "".join(numbered)

    def _position(self) -> Sequence[ChoicePosition]:
        """Return how much the client has of each choice: other choices may still be made again."""
        pairs = zip(self._made, self._wanted, strict=True)
        return [
            max(made, wanted, key=lambda choice: (choice.tokens, choice.characters, choice.has_ended))
            for made, wanted in pairs
        ]


def _first(delta: Delta, tokens: int, characters: int) -> Delta:
    """Return the delta's first tokens and characters, without its end."""
    return replace(
        delta,
        text=delta.text[: max(characters, 0)],
        tokens=delta.tokens[: max(tokens, 0)],
        finish=None,
        stop_reason=None,
    )


def _rest(delta: Delta, tokens: int, characters: int) -> Delta:
    """Return what `_first` leaves."""
    return replace(
        delta, text=delta.text[max(characters, 0) :], tokens=delta.tokens[max(tokens, 0) :], prompt_logprobs=None
    )
