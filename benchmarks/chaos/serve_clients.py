"""HTTP clients that stream one completion after the other, and record the events. Must not know about faults."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.load import Gap
from decoding.errors import ConsortError
from deployments.client import Client

_GAP_S = 0.3  # shorter ones are not kept
_PAUSE_S = 0.5  # after an error


@dataclass(slots=True)
class StreamRecord:
    """What a client received for one request. began_s: on the monotonic clock."""

    number: int
    began_s: float
    texts: dict[int, str] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    error: str | None = None


class Clients:
    """Threads that stream one completion after the other."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], count: int) -> None:
        self.records: list[StreamRecord] = []
        self._client, self._bodies, self._next, self._stopping = Client(url), bodies, 0, False
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
            for event in self._client.stream("/v1/completions", self._bodies[number] | {"stream": True}):
                now_s = time.monotonic()
                if now_s - last_s > _GAP_S:
                    record.gaps.append(Gap(last_s, now_s))
                last_s = now_s
                for choice in event["choices"]:
                    record.texts[choice["index"]] = record.texts.get(choice["index"], "") + choice["text"]
        except ConsortError as error:
            record.error = str(error)
        return record

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                number, self._next = self._next % len(self._bodies), self._next + 1
            record = self.ask(number)
            with self._lock:
                self.records.append(record)
            if record.error is not None:
                time.sleep(_PAUSE_S)
