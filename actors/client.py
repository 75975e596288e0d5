"""Blocking use of a coordinator, for callers without an event loop."""

import queue
from collections.abc import Iterator, Sequence

from actors.coordinator import Coordinator
from actors.request import Delta, Request


def stream(coordinator: Coordinator, request: Request) -> Iterator[Delta]:
    """The deltas of one request, as they are committed. Leaving the iterator early cancels the request.

    Raises:
        ConsortError: the request was refused, or failed.
    """
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    coordinator.submit(request, deltas.put)
    try:
        yield from _until_finished(deltas)
    finally:
        coordinator.cancel(request.request_id)


def generate(coordinator: Coordinator, requests: Sequence[Request]) -> list[list[Delta]]:
    """The deltas of several requests that run at the same time, in the order of the requests.

    Raises:
        ConsortError: a request was refused, or failed.
    """
    queues: list[queue.SimpleQueue[Delta]] = [queue.SimpleQueue() for _ in requests]
    for request, deltas in zip(requests, queues, strict=True):
        coordinator.submit(request, deltas.put)
    return [list(_until_finished(deltas)) for deltas in queues]


def _until_finished(deltas: queue.SimpleQueue[Delta]) -> Iterator[Delta]:
    while True:
        delta = deltas.get()
        if delta.error is not None:
            raise delta.error
        yield delta
        if delta.finish is not None:
            return
