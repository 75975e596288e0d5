"""Writes answers to /v1/responses, as OpenAI's response objects and their events. Knows no HTTP."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.coordinator.request import Delta, Request
from deployments.answers.ensemble_tally import EnsembleTally
from deployments.answers.events import typed_event
from deployments.answers.identity import AnswerIdentity
from deployments.answers.output_items import CallItem, Event, MessageItem, ReasoningItem, Status
from deployments.answers.parsing.choice import make_parser
from deployments.answers.parts import Choice, Part, reasoning_tokens
from deployments.answers.schema import speculation_of
from deployments.answers.token_details import content_logprobs, token_details
from deployments.answers.writer import Writer
from deployments.requests.responses.responses_request import ResponsesRequest
from deployments.strategies.deliberation import Outcome, Progress
from deployments.tokenizers.token_decoder import TokenDecoder
from deployments.tokenizers.tool_format import Arguments, CallStart, Reasoning
from deployments.validation.errors import body_of

_ECHOED = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "top_logprobs", "user")


class ResponsesWriter(Writer):
    """Writes the deltas of one request as messages and function calls."""

    def __init__(
        self, body: ResponsesRequest, requests: Sequence[Request], decoder: TokenDecoder, *, identity: AnswerIdentity
    ) -> None:
        (request,) = requests
        self._body, self._decoder, self._seed = body, decoder, identity.seed
        self._prompt_tokens = len(request.prompt)
        self._id, self._created = f"resp_{identity.answer_id}", identity.created
        by_token = body.logprob_count is not None or bool(body.return_token_details)
        self._choice = Choice(request, decoder, by_token=by_token, prompt_only=False)
        self._parser = make_parser(body, request.prompt, decoder, structured=body.structure is not None)
        self._items: list[MessageItem | CallItem | ReasoningItem] = []
        self._pending: list[Part] = []  # parts whose text the parser still holds back
        self._ensembles = EnsembleTally(requests, wanted=body.return_members is not False)
        self._sequence = 0

    def begin(self) -> str:
        kinds = ("response.created", "response.in_progress")
        return self._write([(kind, {"response": self._response("in_progress")}) for kind in kinds])

    def add(self, index: int, delta: Delta) -> str:
        part, _ = self._choice.add(delta)
        self._ensembles.add(index, delta)
        self._pending.append(part)
        events: list[Event] = []
        for event in self._parser.add(part.text, last=part.finish is not None):
            match event:
                case str(text):
                    events += self._add_text(text)
                case Reasoning(text):
                    events += self._add_reasoning(text)
                    self._pending.clear()
                case CallStart():
                    events += self._begin(CallItem(len(self._items), event))
                    self._pending.clear()
                case Arguments(text):
                    events += self._current_call().add(text)
                    self._pending.clear()
        if part.finish is not None:
            events += self._end(_status(part))
        return self._write(events)

    def add_progress(self, index: int, event: Progress | Outcome) -> str:
        """Record an outcome. Progress has no event in OpenAI's API."""
        if isinstance(event, Outcome):
            self._ensembles.conclude(index, event)
        return ""

    def end(self) -> str:
        whole = self.whole()
        kind = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
        return self._write([(kind, {"response": whole})])

    def fail(self, error: Exception) -> str:
        problem = body_of(error).error
        return self._write([("error", {"code": problem.code, "message": problem.message, "param": problem.param})])

    def whole(self) -> dict[str, Any]:
        statistics = self._choice.statistics
        reasoning = "".join(item.text for item in self._items if isinstance(item, ReasoningItem))
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": statistics.cached},
            "output_tokens": statistics.committed,
            "output_tokens_details": {
                "reasoning_tokens": reasoning_tokens(reasoning, self._choice.whole().tokens, self._decoder)
            },
            "total_tokens": self._prompt_tokens + statistics.committed,
        }
        speculation = speculation_of(statistics).model_dump()
        detail = self._ensembles.detail(0)
        ensemble = {} if detail is None else {"ensemble": detail.model_dump(exclude_unset=True)}
        response = self._response(_status(self._choice))
        return {**response, "usage": usage, "speculation": speculation, **ensemble, "seed": self._seed}

    def _add_text(self, text: str) -> Sequence[Event]:
        """Add text to the current message, or begin a message."""
        item, events = self._items[-1] if self._items else None, list[Event]()
        if not isinstance(item, MessageItem):
            item = MessageItem(len(self._items), self._token_fields)
            events += self._begin(item)
        events += item.add(replace(Part.joined(self._pending), text=text))
        self._pending.clear()
        return events

    def _add_reasoning(self, text: str) -> Sequence[Event]:
        item, events = self._items[-1] if self._items else None, list[Event]()
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(len(self._items))
            events += self._begin(item)
        return [*events, *item.add(text)]

    def _current_call(self) -> CallItem:
        assert isinstance(self._items[-1], CallItem)
        return self._items[-1]

    def _begin(self, item: MessageItem | CallItem | ReasoningItem) -> Sequence[Event]:
        """Begin an item and end the item before it."""
        ended = self._items[-1].end("completed") if self._items else []
        self._items.append(item)
        return [*ended, *item.begin()]

    def _end(self, status: Status) -> Sequence[Event]:
        """End the last item. An answer without items gets an empty message."""
        more: Sequence[Event] = []
        if not self._items or (any(part.tokens for part in self._pending) and isinstance(self._items[-1], MessageItem)):
            more = self._add_text("")
        return [*more, *self._items[-1].end(status)]

    def _write(self, events: Sequence[Event]) -> str:
        numbered = enumerate(events, self._sequence)
        self._sequence += len(events)
        return "".join(
            typed_event({"type": kind, "sequence_number": number, **fields}) for number, (kind, fields) in numbered
        )

    def _response(self, status: Status) -> dict[str, Any]:
        body = self._body
        text_format = body.text and body.text.format
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": body.model,
            "output": [item.document() for item in self._items],
            **body.model_dump(include={*_ECHOED}),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": text_format.model_dump(by_alias=True) if text_format else {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice.flat,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "truncation": "disabled",
            "usage": None,
        }

    def _token_fields(self, part: Part) -> dict[str, Any]:
        """Fields about a part's tokens, as the request wants them."""
        count = self._body.logprob_count
        logprobs = [] if count is None else content_logprobs(part, count, self._decoder)
        if not self._body.return_token_details:
            return {"logprobs": logprobs}
        return {"logprobs": logprobs, "token_details": token_details(part)}


def _status(answer: Part | Choice) -> Status:
    return "incomplete" if answer.finish == "length" else "completed"
