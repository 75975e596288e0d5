"""Blocking calls of a coordinator, for callers without an event loop.

`check` is called after every second without a delta. It raises if waiting is pointless.
"""

import queue
from collections.abc import Callable, Iterator, Sequence

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Request

_CHECK_PERIOD_S = 1.0


def stream(coordinator: Coordinator, request: Request, check: Callable[[], None]) -> Iterator[Delta]:
    """Yield the deltas of a request as they are committed. Closing the iterator cancels the request.

    Raises:
        ConsortError: the request was refused or failed.
    """
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    coordinator.submit(request, deltas.put)
    try:
        yield from _until_finished(deltas, check)
    finally:
        coordinator.cancel(request.request_id, deltas.put)


def generate(coordinator: Coordinator, requests: Sequence[Request], check: Callable[[], None]) -> list[list[Delta]]:
    """Run several requests at the same time. Return the deltas of each, in the order of the requests.

    Raises:
        ConsortError: a request was refused or failed.
    """
    queues: list[queue.SimpleQueue[Delta]] = [queue.SimpleQueue() for _ in requests]
    try:
        for request, deltas in zip(requests, queues, strict=True):
            coordinator.submit(request, deltas.put)
        return [list(_until_finished(deltas, check)) for deltas in queues]
    finally:
        for request, deltas in zip(requests, queues, strict=True):
            coordinator.cancel(request.request_id, deltas.put)


def _until_finished(deltas: queue.SimpleQueue[Delta], check: Callable[[], None]) -> Iterator[Delta]:
    while True:
        try:
            delta = deltas.get(timeout=_CHECK_PERIOD_S)
        except queue.Empty:
            check()
            continue
        if delta.error is not None:
            raise delta.error
        yield delta
        if delta.finish is not None:
            return
