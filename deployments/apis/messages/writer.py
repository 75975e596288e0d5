"""Writes answers to /v1/messages, as Anthropic's messages and their events."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from actors.coordinator.request import Delta, Request
from deployments.apis.choices import speculation_of
from deployments.apis.decoder import TokenDecoder
from deployments.apis.ensemble_details import EnsembleTally
from deployments.apis.errors import anthropic_body, body_of, status_of
from deployments.apis.events import typed_event
from deployments.apis.messages.request import MessagesRequest
from deployments.apis.parser import make_parser
from deployments.apis.parts import Choice
from deployments.apis.tool_calls import Arguments, CallStart, Reasoning
from deployments.apis.writer import AnswerIdentity, Writer
from deployments.strategies.deliberation import Outcome, Progress

Event = tuple[str, dict[str, Any]]  # type, other fields


class ContentBlock(ABC):
    """A content block while it is generated."""

    delta: str  # its type
    delta_field: str

    def __init__(self, index: int) -> None:
        """index: of the block in the message."""
        self._index = index
        self._texts: list[str] = []

    def begin(self) -> Sequence[Event]:
        return [("content_block_start", {"index": self._index, "content_block": self._empty()})]

    def add(self, text: str) -> Sequence[Event]:
        self._texts.append(text)
        return [self._delta({"type": self.delta, self.delta_field: text})]

    def end(self) -> Sequence[Event]:
        return [("content_block_stop", {"index": self._index})]

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The block so far, as JSON."""

    @abstractmethod
    def _empty(self) -> dict[str, Any]:
        """The block before its first text."""

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"index": self._index, "delta": delta}

    @property
    def _text(self) -> str:
        return "".join(self._texts)


class AnswerText(ContentBlock):
    """A text."""

    delta, delta_field = "text_delta", "text"

    def document(self) -> dict[str, Any]:
        return {"type": "text", "text": self._text, "citations": None}

    def _empty(self) -> dict[str, Any]:
        return {"type": "text", "text": "", "citations": None}


class AnswerThinking(ContentBlock):
    """What the model writes before its answer. Its signature is empty: earlier thinking is taken as it comes."""

    delta, delta_field = "thinking_delta", "thinking"

    def end(self) -> Sequence[Event]:
        return [self._delta({"type": "signature_delta", "signature": ""}), *super().end()]

    def document(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": self._text, "signature": ""}

    def _empty(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}


class AnswerCall(ContentBlock):
    """A call of a tool. In a whole answer, arguments that are no object, or were cut off, become an empty one."""

    delta, delta_field = "input_json_delta", "partial_json"

    def __init__(self, index: int, start: CallStart) -> None:
        super().__init__(index)
        self._start = start

    def document(self) -> dict[str, Any]:
        try:
            given = json.loads(self._text)
        except (ValueError, RecursionError):
            given = {}
        return {**self._empty(), "input": given if isinstance(given, dict) else {}}

    def _empty(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._start.id, "name": self._start.name, "input": {}}


class MessagesWriter(Writer):
    """Writes the deltas of one request as texts, thinking and calls of tools."""

    def __init__(
        self, body: MessagesRequest, requests: Sequence[Request], decoder: TokenDecoder, *, identity: AnswerIdentity
    ) -> None:
        (request,) = requests
        self._body, self._seed = body, identity.seed
        self._prompt_tokens = len(request.prompt)
        self._id = f"msg_{identity.answer_id}"
        self._choice = Choice(request, decoder, by_token=False, prompt_only=False)
        self._parser = make_parser(body, request.prompt, decoder, structured=body.structure is not None)
        self._blocks: list[ContentBlock] = []
        self._ensembles = EnsembleTally(requests, wanted=body.return_members is not False)

    def begin(self) -> str:
        return _write([("message_start", {"message": self._message(None)})])

    def add(self, index: int, delta: Delta) -> str:
        part, _ = self._choice.add(delta)
        self._ensembles.add(index, delta)
        events: list[Event] = []
        for event in self._parser.add(part.text, last=part.finish is not None):
            match event:
                case str(text):
                    events += self._add(AnswerText, text)
                case Reasoning(text):
                    events += self._add(AnswerThinking, text)
                case CallStart():
                    events += self._begin(AnswerCall(len(self._blocks), event))
                case Arguments(text):
                    events += self._blocks[-1].add(text)
        if part.finish is not None and self._blocks:
            events += self._blocks[-1].end()
        return _write(events)

    def add_progress(self, index: int, event: Progress | Outcome) -> str:
        """Record an outcome. Progress has no event in Anthropic's API."""
        if isinstance(event, Outcome):
            self._ensembles.conclude(index, event)
        return ""

    def end(self) -> str:
        whole = self.whole()
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        extras = {name: whole[name] for name in ("speculation", "seed")}
        return _write([("message_delta", {"delta": delta, "usage": whole["usage"], **extras}), ("message_stop", {})])

    def fail(self, error: Exception) -> str:
        return typed_event(anthropic_body(body_of(error), status_of(error)))

    def whole(self) -> dict[str, Any]:
        detail = self._ensembles.detail(0)
        ensemble = {} if detail is None else {"ensemble": detail.model_dump(exclude_unset=True)}
        speculation = speculation_of(self._choice.statistics).model_dump()
        return {**self._message(self._stop_reason()), "speculation": speculation, **ensemble, "seed": self._seed}

    def _add(self, kind: type[AnswerText | AnswerThinking], text: str) -> Sequence[Event]:
        """Add text to the current block, or begin a block of that kind."""
        if self._blocks and isinstance(self._blocks[-1], kind):
            return self._blocks[-1].add(text)
        begun = self._begin(kind(len(self._blocks)))
        return [*begun, *self._blocks[-1].add(text)]

    def _begin(self, block: ContentBlock) -> Sequence[Event]:
        """Begin a block and end the block before it."""
        ended = self._blocks[-1].end() if self._blocks else []
        self._blocks.append(block)
        return [*ended, *block.begin()]

    def _stop_reason(self) -> str:
        if self._choice.finish == "length":
            return "max_tokens"
        if self._parser.has_called:
            return "tool_use"
        return "end_turn" if self._stop_sequence is None else "stop_sequence"

    @property
    def _stop_sequence(self) -> str | None:
        reason = self._choice.whole().stop_reason
        return reason if isinstance(reason, str) and reason in (self._body.stop or ()) else None

    def _message(self, stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [block.document() for block in self._blocks],
            "stop_reason": stop_reason,
            "stop_sequence": self._stop_sequence if stop_reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": self._prompt_tokens - self._choice.statistics.cached,
                "output_tokens": self._choice.statistics.committed,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": self._choice.statistics.cached,
            },
        }


def _write(events: Sequence[Event]) -> str:
    return "".join(typed_event({"type": kind, **fields}) for kind, fields in events)
