"""Writes answers to /v1/messages, as Anthropic's messages and their events. Knows no HTTP."""

from collections.abc import Sequence
from typing import Any

from actors.coordinator.request import Delta, Request
from deployments.answers.anthropic.content_blocks import AnswerCall, AnswerText, AnswerThinking, ContentBlock, Event
from deployments.answers.ensemble_tally import EnsembleTally
from deployments.answers.events import typed_event
from deployments.answers.identity import AnswerIdentity
from deployments.answers.parsing.choice import make_parser
from deployments.answers.parts import Choice
from deployments.answers.schema import speculation_of
from deployments.answers.writer import Writer
from deployments.requests.anthropic.messages_request import MessagesRequest
from deployments.strategies.deliberation import Outcome, Progress
from deployments.tokenizers.token_decoder import TokenDecoder
from deployments.tokenizers.tool_format import Arguments, CallStart, Reasoning
from deployments.validation.errors import anthropic_body, body_of, status_of


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
