"""Writes answers to /v1/responses, as OpenAI's response objects and their events."""

import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

from actors.coordinator.request import Request
from deployments.apis.decoder import TokenDecoder
from deployments.apis.errors import error_event, typed_sse
from deployments.apis.events import Arguments, Call, Reasoning, Text
from deployments.apis.items import Item, ItemEvent, ItemWriter, Status
from deployments.apis.parts import Part, reasoning_tokens
from deployments.apis.responses.request import ResponsesRequest
from deployments.apis.token_details import content_logprobs, token_details
from deployments.apis.writer import AnswerIdentity
from deployments.storage.store import Turn

_LEAD = 16  # tokens; more than begin an assistant's turn
_ECHOED = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "top_logprobs", "user")


class ResponsesWriter(ItemWriter):
    """Writes the deltas of one request as messages, reasoning and function calls."""

    _body: ResponsesRequest

    def __init__(
        self, body: ResponsesRequest, requests: Sequence[Request], decoder: TokenDecoder, *, identity: AnswerIdentity
    ) -> None:
        super().__init__(body, requests, decoder, identity=identity)
        self._lead = list(requests[0].prompt[-_LEAD:])
        self._sequence = 0

    def begin(self) -> str:
        kinds = ("response.created", "response.in_progress")
        return self._write([(kind, {"response": self._response("in_progress")}) for kind in kinds])

    def end(self) -> str:
        whole = self.whole()
        return self._write([(f"response.{whole['status']}", {"response": whole})])

    def fail(self, error: Exception) -> str:
        return error_event(error, "responses", sequence_number=self._sequence)

    @property
    def turn(self) -> Turn:
        """The request and its whole answer, to be kept."""
        items = [item.document() for item in self._body.input]
        return Turn(self.whole(), items, self._lead, self._choice.whole().token_ids)

    def whole(self) -> dict[str, Any]:
        return self._final | {"store": self._body.memory.is_kept}

    @cached_property
    def _final(self) -> dict[str, Any]:
        statistics = self._choice.statistics
        reasoning = "".join(item.text for item in self._items if isinstance(item, _Thinking))
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": statistics.cached},
            "output_tokens": statistics.committed,
            "output_tokens_details": {
                "reasoning_tokens": reasoning_tokens(reasoning, self._choice.whole().token_ids, self._decoder)
            },
            "total_tokens": self._prompt_tokens + statistics.committed,
        }
        status: Status = "incomplete" if self._choice.finish == "length" else "completed"
        return {**self._response(status), "usage": usage, **self._extras()}

    def _item(self, event: Text | Reasoning | Call) -> Item:
        index = len(self._items)
        match event:
            case Text():
                return _Message(index, self._identity, self._token_fields)
            case Reasoning():
                return _Thinking(index, self._identity)
            case Call():
                return _FunctionCall(index, self._identity, event)

    def _end(self, status: Status) -> Sequence[ItemEvent]:
        """End the last item. An answer without items gets an empty message, and late tokens join a message."""
        late = any(part.tokens for part in self._pending)
        more = self._take(Text("")) if not self._items or (late and isinstance(self._items[-1], _Message)) else []
        return [*more, *super()._end(status)]

    def _write(self, events: Sequence[ItemEvent]) -> str:
        numbered = enumerate(events, self._sequence)
        self._sequence += len(events)
        return "".join(
            typed_sse({"type": kind, "sequence_number": number, **fields}) for number, (kind, fields) in numbered
        )

    def _response(self, status: Status) -> dict[str, Any]:
        body = self._body
        text_format = body.text and body.text.format
        return {
            "id": f"resp_{self._identity.answer_id}",
            "object": "response",
            "created_at": self._identity.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": body.model,
            "output": [item.document() for item in self._items],
            **body.model_dump(include={*_ECHOED}),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.memory.is_kept,
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


class _Item(Item):
    prefix: ClassVar[str]  # of its id

    def __init__(self, index: int, identity: AnswerIdentity) -> None:
        super().__init__(index)
        self.id = f"{self.prefix}_{identity.answer_id}{secrets.token_hex(12)}"
        self._status: Status = "in_progress"

    def begin(self) -> Sequence[ItemEvent]:
        return [self._item_event("added")]

    def end(self, status: Status) -> Sequence[ItemEvent]:
        self._status = status
        return [self._item_event("done")]

    def _item_event(self, kind: str) -> ItemEvent:
        return f"response.output_item.{kind}", {"output_index": self._index, "item": self.document()}

    def _event(self, kind: str, **fields: Any) -> ItemEvent:
        return f"response.{kind}", {"item_id": self.id, "output_index": self._index, **fields}


class _Message(_Item):
    content, prefix = Text, "msg"

    def __init__(self, index: int, identity: AnswerIdentity, token_fields: Callable[[Part], dict[str, Any]]) -> None:
        """token_fields: function that gives the fields about a part's tokens, such as `logprobs`."""
        super().__init__(index, identity)
        self._token_fields = token_fields
        self._parts: list[Part] = []
        self._final_content: dict[str, Any] | None = None

    def begin(self) -> Sequence[ItemEvent]:
        added = super().begin()
        self._parts.append(Part())
        return [*added, self._event("content_part.added", content_index=0, part=self._content())]

    def add(self, part: Part) -> Sequence[ItemEvent]:
        self._parts.append(part)
        fields = self._token_fields(part)
        if not (part.text or (part.tokens and "token_details" in fields)):
            return []
        return [self._event("output_text.delta", content_index=0, delta=part.text, **fields)]

    def end(self, status: Status) -> Sequence[ItemEvent]:
        content = self._final_content = self._content()
        done = {"text": content["text"], "logprobs": content["logprobs"]}
        return [
            self._event("output_text.done", content_index=0, **done),
            self._event("content_part.done", content_index=0, part=content),
            *super().end(status),
        ]

    def document(self) -> dict[str, Any]:
        content = [self._content()] if self._parts else []
        return {"id": self.id, "type": "message", "status": self._status, "role": "assistant", "content": content}

    def _content(self) -> dict[str, Any]:
        if self._final_content is not None:
            return self._final_content
        whole = Part.joined(self._parts)
        return {"type": "output_text", "text": whole.text, "annotations": [], **self._token_fields(whole)}


class _Thinking(_Item):
    content, prefix = Reasoning, "rs"

    def add(self, part: Part) -> Sequence[ItemEvent]:
        self._texts.append(part.text)
        return [self._event("reasoning_text.delta", content_index=0, delta=part.text)]

    def end(self, status: Status) -> Sequence[ItemEvent]:
        return [self._event("reasoning_text.done", content_index=0, text=self.text), *super().end(status)]

    def document(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.text}] if self.text else []
        return {"id": self.id, "type": "reasoning", "status": self._status, "summary": [], "content": content}


class _FunctionCall(_Item):
    content, prefix = Arguments, "fc"

    def __init__(self, index: int, identity: AnswerIdentity, call: Call) -> None:
        super().__init__(index, identity)
        self._call = call

    def add(self, part: Part) -> Sequence[ItemEvent]:
        self._texts.append(part.text)
        return [self._event("function_call_arguments.delta", delta=part.text)]

    def end(self, status: Status) -> Sequence[ItemEvent]:
        return [self._event("function_call_arguments.done", arguments=self.text), *super().end(status)]

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self._status,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": self.text,
        }
