"""Writes answers to /v1/responses: OpenAI's objects, and the events by which they come about."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from actors.request import Delta, Request
from deployments.answers.ensemble_tally import EnsembleTally
from deployments.answers.events import typed_event
from deployments.answers.parts import Choice, Part
from deployments.answers.responses import speculation_of
from deployments.answers.token_shapes import chat_logprobs, token_details
from deployments.answers.writer import Writer
from deployments.endpoints.vocabulary import Vocabulary
from deployments.http.errors import body_of
from deployments.requests.responses_request import ResponsesRequest
from deployments.strategies.progress import Outcome, Progress

_ECHOED = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "top_logprobs", "user")


class ResponsesWriter(Writer):
    """Turns the deltas of one request into a response with one message."""

    def __init__(
        self, body: ResponsesRequest, requests: Sequence[Request], vocabulary: Vocabulary, *, seed: int
    ) -> None:
        (request,) = requests
        self._body, self._vocabulary, self._seed = body, vocabulary, seed
        self._prompt_tokens = len(request.prompt)
        self._id, self._item_id = f"resp_{secrets.token_hex(24)}", f"msg_{secrets.token_hex(24)}"
        self._created = int(time.time())
        by_token = body.logprob_count is not None or bool(body.return_token_details)
        self._choice = Choice(request, vocabulary, by_token=by_token, prompt_only=False)
        self._ensembles = EnsembleTally(requests, wanted=body.return_members is not False)
        self._sequence = 0

    def begin(self) -> str:
        started = [{"type": kind, "response": self._response([])} for kind in ("created", "in_progress")]
        return "".join(
            [
                *(self._event(f"response.{event.pop('type')}", **event) for event in started),
                self._event("response.output_item.added", output_index=0, item=self._item(None)),
                self._event("response.content_part.added", **self._place, part=self._content(Part())),
            ]
        )

    def add(self, index: int, delta: Delta) -> str:
        part, _ = self._choice.add(delta)
        self._ensembles.add(index, delta)
        if not (part.text or (part.tokens and self._body.return_token_details)):
            return ""
        told = {"delta": part.text, "logprobs": self._logprobs(part)}
        return self._event("response.output_text.delta", **self._place, **told, **self._details(part))

    def tell(self, index: int, event: Progress | Outcome) -> str:
        """Progress has no event in OpenAI's API."""
        if isinstance(event, Outcome):
            self._ensembles.conclude(index, event)
        return ""

    def end(self) -> str:
        whole = self._choice.whole()
        done = {"text": whole.text, "logprobs": self._logprobs(whole)}
        kind = "response.incomplete" if self._status(whole) == "incomplete" else "response.completed"
        return "".join(
            [
                self._event("response.output_text.done", **self._place, **done),
                self._event("response.content_part.done", **self._place, part=self._content(whole)),
                self._event("response.output_item.done", output_index=0, item=self._item(whole)),
                self._event(kind, response=self._finished(whole)),
            ]
        )

    def fail(self, error: Exception) -> str:
        problem = body_of(error).error
        return self._event("error", code=problem.code, message=problem.message, param=problem.param)

    def whole(self) -> dict[str, Any]:
        return self._finished(self._choice.whole())

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        text = typed_event({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return text

    def _response(self, output: list[dict[str, Any]], part: Part | None = None) -> dict[str, Any]:
        status = self._status(part)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        given = self._body.model_dump(include={*_ECHOED})
        text_format = self._body.text and self._body.text.format
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._body.model,
            "output": output,
            **given,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "text": {"format": text_format.model_dump(by_alias=True) if text_format else {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None,
        }

    def _finished(self, part: Part) -> dict[str, Any]:
        statistics = self._choice.statistics
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": statistics.committed,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt_tokens + statistics.committed,
        }
        speculation = speculation_of(statistics).model_dump()
        response = self._response([self._item(part)], part)
        told = self._ensembles.of(0)
        ensemble = {} if told is None else {"ensemble": told.model_dump(exclude_unset=True)}
        return {**response, "usage": usage, "speculation": speculation, **ensemble, "seed": self._seed}

    def _item(self, part: Part | None) -> dict[str, Any]:
        content = [] if part is None else [self._content(part)]
        status = self._status(part)
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _content(self, part: Part) -> dict[str, Any]:
        logprobs = self._logprobs(part)
        return {
            "type": "output_text",
            "text": part.text,
            "annotations": [],
            "logprobs": logprobs,
            **self._details(part),
        }

    def _logprobs(self, part: Part) -> list[dict[str, Any]]:
        count = self._body.logprob_count
        return [] if count is None else chat_logprobs(part, count, self._vocabulary).model_dump()["content"]

    def _details(self, part: Part) -> dict[str, Any]:
        if not self._body.return_token_details:
            return {}
        return {"token_details": [detail.model_dump(exclude_unset=True) for detail in token_details(part)]}

    @staticmethod
    def _status(part: Part | None) -> str:
        if part is None or part.finish is None:
            return "in_progress"
        return "incomplete" if part.finish == "length" else "completed"
