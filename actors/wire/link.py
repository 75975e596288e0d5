"""Links: how a loop sends messages to its peers and receives theirs. One-way, batched, never blocking the sender.

Two implementations share this interface: `LocalLink` here (queues in one process, for tests and colocated drafters) and
`actors.wire.zmq_link` (between processes and hosts). One loop thread uses a link; any thread may call `wake`.
"""

import queue
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Message

Envelope = tuple[str, Message]  # who sent it, what
MAX_RECEIVED = (
    1000  # messages, or batches of them, per call of `receive`, so that no peer can keep a loop from its work
)


class Link(Protocol):
    """One party's end. Names of peers are strings; a message to a peer that is gone is dropped."""

    name: str

    @property
    def malformed(self) -> int:
        """Batches that made no sense, and were dropped."""

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        """Deliver messages to a peer, in order, without waiting."""

    def receive(self, timeout_s: float) -> list[Envelope]:
        """What has arrived, at most MAX_RECEIVED; waits up to `timeout_s` for the first. [] after the time-out."""

    def wake(self) -> None:
        """Make `receive` return at once, now or the next time; any thread may call it."""


class ConnectingLink(Link, Protocol):
    """One that opens and closes connections to replicas, as they come and go."""

    def connect(self, address: ReplicaAddress) -> None:
        """Make the replica reachable under its name."""

    def disconnect(self, peer: str) -> None:
        """Forget the replica; messages to it are dropped from now on."""


class LocalExchange:
    """The meeting point of the local links of one process."""

    def __init__(self) -> None:
        self.inboxes: dict[str, queue.SimpleQueue[Envelope | None]] = {}

    def join(self, name: str) -> "LocalLink":
        return LocalLink(name, self)


class LocalLink:
    """A link over in-process queues. `None` in a queue is a wake-up call."""

    malformed = 0

    def __init__(self, name: str, exchange: LocalExchange) -> None:
        self.name = name
        self._exchange = exchange
        self._inbox: queue.SimpleQueue[Envelope | None] = queue.SimpleQueue()
        exchange.inboxes[name] = self._inbox

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        inbox = self._exchange.inboxes.get(peer)
        if inbox is not None:
            for message in messages:
                inbox.put((self.name, message))

    def receive(self, timeout_s: float) -> list[Envelope]:
        envelopes: list[Envelope | None] = []
        with suppress(queue.Empty):
            envelopes.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while len(envelopes) < MAX_RECEIVED:
                envelopes.append(self._inbox.get_nowait())
        return [envelope for envelope in envelopes if envelope is not None]

    def wake(self) -> None:
        self._inbox.put(None)

    def connect(self, address: ReplicaAddress) -> None:
        """Nothing to do: the exchange knows all names."""

    def disconnect(self, peer: str) -> None:
        """Nothing to do: a peer that closed its link is no longer in the exchange."""

    def close(self) -> None:
        self._exchange.inboxes.pop(self.name, None)


class Outbox:
    """Collects the messages of one turn of a loop, and sends each peer its share as one batch."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._messages: dict[str, list[Message]] = {}

    def put(self, peer: str, message: Message) -> None:
        self._messages.setdefault(peer, []).append(message)

    def flush(self) -> None:
        for peer, messages in self._messages.items():
            self._link.send(peer, messages)
        self._messages.clear()
