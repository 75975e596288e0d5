"""OpenAI's client, streaming one completion after the other and recording the events. Must not know about faults."""

import json
import threading
import time
from collections.abc import Iterator
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
    """What a client received for one request. began_s: on the monotonic clock."""

    number: int
    began_s: float
    texts: dict[int, str] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    error: str | None = None
    resumed: int = 0  # times that its connection broke and another went on


class Clients:
    """Threads that stream one completion after the other."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], count: int, *, resuming: bool = False) -> None:
        """resuming: whether they ask for the ids of events, and go on after the last one if a connection breaks."""
        self.records: list[StreamRecord] = []
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self._bodies, self._resuming, self._next, self._stopping = bodies, resuming, 0, False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join()

    def ask(self, number: int) -> StreamRecord:
        """Send a request and record the answer."""
        last_s = time.monotonic()
        record = StreamRecord(number, last_s)
        try:
            for event in self._resumed(record) if self._resuming else self._events(self._bodies[number]):
                now_s = time.monotonic()
                if now_s - last_s > _GAP_S:
                    record.gaps.append(Gap(last_s, now_s))
                last_s = now_s
                for choice in event["choices"]:
                    record.texts[choice["index"]] = record.texts.get(choice["index"], "") + choice["text"]
        except Exception as error:  # the client lets those of its HTTP library through, which depends on its version
            record.error = repr(error)
        return record

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

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                number, self._next = self._next % len(self._bodies), self._next + 1
            record = self.ask(number)
            with self._lock:
                self.records.append(record)
            if record.error is not None:
                time.sleep(_PAUSE_S)


def _arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body as arguments of OpenAI's client."""
    return {"model": body["model"], "prompt": body["prompt"], "extra_body": body}
