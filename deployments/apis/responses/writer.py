"""Writes answers to /v1/responses, as OpenAI's response objects and their events."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from actors.coordinator.request import Delta, Request
from deployments.apis.choices import speculation_of
from deployments.apis.decoder import TokenDecoder
from deployments.apis.ensemble_details import EnsembleTally
from deployments.apis.errors import body_of
from deployments.apis.events import typed_event
from deployments.apis.parser import make_parser
from deployments.apis.parts import Choice, Part, reasoning_tokens
from deployments.apis.responses.request import ResponsesRequest
from deployments.apis.token_details import content_logprobs, token_details
from deployments.apis.tool_calls import Arguments, CallStart, Reasoning
from deployments.apis.writer import AnswerIdentity, Writer
from deployments.strategies.deliberation import Outcome, Progress

Event = tuple[str, dict[str, Any]]  # type, other fields
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(ABC):
    """An output item while it is generated."""

    id: str

    def __init__(self, index: int) -> None:
        """index: of the item in the output."""
        self._ids: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.status: Status = "in_progress"

    def begin(self) -> Sequence[Event]:
        return [self._item_event("added")]

    def end(self, status: Status) -> Sequence[Event]:
        self.status = status
        return [self._item_event("done")]

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The item so far, as JSON."""

    def _item_event(self, kind: str) -> Event:
        return f"response.output_item.{kind}", {"output_index": self._ids["output_index"], "item": self.document()}


class MessageItem(OutputItem):
    """A text message."""

    def __init__(self, index: int, token_fields: Callable[[Part], dict[str, Any]]) -> None:
        """token_fields: function that gives the fields about a part's tokens, such as `logprobs`."""
        self.id = f"msg_{secrets.token_hex(24)}"
        super().__init__(index)
        self._ids["content_index"] = 0
        self._token_fields = token_fields
        self._parts: list[Part] = []
        self._final_content: dict[str, Any] | None = None

    def begin(self) -> Sequence[Event]:
        added = self._item_event("added")
        self._parts.append(Part())
        return [added, ("response.content_part.added", {**self._ids, "part": self._content()})]

    def add(self, part: Part) -> Sequence[Event]:
        """Add text, or tokens without text; return the events."""
        self._parts.append(part)
        fields = self._token_fields(part)
        if not (part.text or (part.sources and "token_details" in fields)):
            return []
        return [("response.output_text.delta", {**self._ids, "delta": part.text, **fields})]

    def end(self, status: Status) -> Sequence[Event]:
        content = self._final_content = self._content()
        done = {"text": content["text"], "logprobs": content["logprobs"]}
        return [
            ("response.output_text.done", {**self._ids, **done}),
            ("response.content_part.done", {**self._ids, "part": content}),
            *super().end(status),
        ]

    def document(self) -> dict[str, Any]:
        content = [self._content()] if self._parts else []
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def _content(self) -> dict[str, Any]:
        if self._final_content is not None:
            return self._final_content
        whole = Part.joined(self._parts)
        return {"type": "output_text", "text": whole.text, "annotations": [], **self._token_fields(whole)}


class ReasoningItem(OutputItem):
    """What the model writes before its answer."""

    def __init__(self, index: int) -> None:
        self.id = f"rs_{secrets.token_hex(24)}"
        super().__init__(index)
        self._ids["content_index"] = 0
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str) -> Sequence[Event]:
        self._texts.append(text)
        return [("response.reasoning_text.delta", {**self._ids, "delta": text})]

    def end(self, status: Status) -> Sequence[Event]:
        return [("response.reasoning_text.done", {**self._ids, "text": self.text}), *super().end(status)]

    def document(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.text}] if self.text else []
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}


class CallItem(OutputItem):
    """A function call."""

    def __init__(self, index: int, start: CallStart) -> None:
        self.id = f"fc_{secrets.token_hex(24)}"
        super().__init__(index)
        self._start = start
        self._arguments: list[str] = []

    def add(self, arguments: str) -> Sequence[Event]:
        self._arguments.append(arguments)
        return [("response.function_call_arguments.delta", {**self._ids, "delta": arguments})]

    def end(self, status: Status) -> Sequence[Event]:
        done = {"arguments": "".join(self._arguments)}
        return [("response.function_call_arguments.done", {**self._ids, **done}), *super().end(status)]

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._start.id,
            "name": self._start.name,
            "arguments": "".join(self._arguments),
        }


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
