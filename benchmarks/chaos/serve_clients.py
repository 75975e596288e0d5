"""OpenAI's client, streaming one completion after the other and recording the events. Must not know about faults."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from benchmarks.chaos.load import Gap

_GAP_S = 0.3  # shorter ones are not kept
_PAUSE_S = 0.5  # after an error
_PATIENCE_S = 120.0  # for a server to answer again after a connection broke
_LAST_EVENT_ID, _NO_EVENT = "Last-Event-ID", "0"


@dataclass(slots=True)
class StreamRecord:
    """What a client received for one request. Times are on the monotonic clock."""

    number: int
    began_s: float
    first_s: float | None = None  # arrival of the first event
    ended_s: float | None = None
    texts: dict[int, str] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    error: str | None = None
    resumed: int = 0  # tries to go on after the connection broke

    def is_streaming(self, at_s: float) -> bool:
        """Whether some of the answer, but not all of it, had come by then."""
        return self.first_s is not None and self.first_s < at_s and (self.ended_s is None or at_s < self.ended_s)

    def has_paused(self, at_s: float) -> bool:
        """Whether nothing came for long after that time, or another connection had to go on."""
        return self.error is not None or any(gap.began_s - 0.5 < at_s < gap.ended_s for gap in self.gaps)

    @property
    def length(self) -> int:
        """Characters so far, of all choices."""
        return sum(map(len, list(self.texts.values())))


class Clients:
    """Threads that stream one completion after the other."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], count: int, *, resuming: bool = False) -> None:
        """resuming: whether they ask for the ids of events, and go on after the last one if a connection breaks."""
        self.records: list[StreamRecord] = []
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self._bodies, self._resuming, self._next, self._stopping = bodies, resuming, 0, False
        self._lock = threading.Lock()
        self._current: list[StreamRecord | None] = [None] * count
        self._threads = [threading.Thread(target=self._run, args=(client,), daemon=True) for client in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join()

    def are_streaming(self, expected: Sequence[StreamRecord]) -> bool:
        """Whether every client has some of an answer, and at least half of it is still to come."""
        return all(
            record is not None and 0 < record.length < expected[record.number].length / 2 for record in self._current
        )

    def ask(self, number: int) -> StreamRecord:
        """Send a request and record the answer."""
        record = StreamRecord(number, time.monotonic())
        self._record(record)
        return record

    def _record(self, record: StreamRecord) -> None:
        number, last_s = record.number, record.began_s
        try:
            for event in self._resumed(record) if self._resuming else self._events(self._bodies[number]):
                now_s = time.monotonic()
                if now_s - last_s > _GAP_S:
                    record.gaps.append(Gap(last_s, now_s))
                last_s = now_s
                record.first_s = record.first_s or now_s
                for choice in event["choices"]:
                    record.texts[choice["index"]] = record.texts.get(choice["index"], "") + choice["text"]
        except Exception as error:  # the client lets those of its HTTP library through, which depends on its version
            record.error = repr(error)
        record.ended_s = time.monotonic()

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a stream's events."""
        create: Any = self._client.completions.create  # its overloads name every argument
        for chunk in create(**_arguments(body), stream=True):
            yield chunk.model_dump()

    def _resumed(self, record: StreamRecord) -> Iterator[dict[str, Any]]:
        """Yield a stream's events, from as many connections as it takes."""
        last_id, last_s = _NO_EVENT, time.monotonic()
        create: Any = self._client.completions.with_streaming_response.create
        arguments = _arguments(self._bodies[record.number])
        while True:
            try:
                with create(**arguments, stream=True, extra_headers={_LAST_EVENT_ID: last_id}) as response:
                    for line in response.iter_lines():
                        name, _, value = line.partition(": ")
                        if name == "id":
                            last_id, last_s = value, time.monotonic()
                        elif name == "data" and value == "[DONE]":
                            return
                        elif name == "data":
                            yield json.loads(value)
            except Exception as error:  # as above
                refused = isinstance(error, openai.APIStatusError) and not isinstance(error, openai.InternalServerError)
                if refused or time.monotonic() - last_s > _PATIENCE_S:
                    raise
            record.resumed += 1
            time.sleep(_PAUSE_S)

    def _run(self, client: int) -> None:
        while not self._stopping:
            with self._lock:
                number, self._next = self._next % len(self._bodies), self._next + 1
            self._current[client] = record = StreamRecord(number, time.monotonic())
            self._record(record)
            with self._lock:
                self.records.append(record)
            if record.error is not None:
                time.sleep(_PAUSE_S)


def _arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body as arguments of OpenAI's client."""
    return {"model": body["model"], "prompt": body["prompt"], "extra_body": body}
