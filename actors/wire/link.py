"""Links, over which loops exchange messages: one-way, batched, never blocking the sender.

`LocalLink` connects loops of one process by queues; `actors.wire.zmq_link` connects processes and hosts. A link belongs
to one loop thread. Any thread may call `wake`.
"""

import queue
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from actors.wire.messages import Message, ReplicaAddress

Envelope = tuple[str, Message]  # sender, message
# Messages or batches per call of `receive`, so that no peer can keep a loop from its work.
MAX_RECEIVED = 1000


class Link(Protocol):
    """One party's end of its connections, which open and close as replicas come and go.

    Messages to unknown peers are dropped.
    """

    name: str

    @property
    def malformed(self) -> int:
        """Number of batches, and of single messages, that were dropped because they could not be decoded."""

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        """Send messages to a peer, in order, without waiting."""

    def reaches(self, peer: str) -> bool:
        """Whether there was a connection to the peer when something was last sent to it, as far as that is known."""

    def receive(self, timeout_s: float) -> list[Envelope]:
        """Return what has arrived, at most MAX_RECEIVED. Wait up to `timeout_s` for the first message."""

    def wake(self) -> None:
        """Make the current or next `receive` return at once. Any thread may call this."""

    def connect(self, address: ReplicaAddress) -> None:
        """Connect to the replica. From then on it is a peer under its name."""

    def disconnect(self, peer: str) -> None:
        """Close the connection. Messages to the replica are dropped from now on."""


class LocalExchange:
    """The inboxes of all local links of one process, by name."""

    def __init__(self) -> None:
        self.inboxes: dict[str, queue.SimpleQueue[Envelope | None]] = {}

    def join(self, name: str) -> "LocalLink":
        return LocalLink(name, self)


class LocalLink:
    """A link over in-process queues. `None` in a queue wakes the receiver."""

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

    def reaches(self, peer: str) -> bool:
        return peer in self._exchange.inboxes

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
        """Do nothing: the exchange knows all names."""

    def disconnect(self, peer: str) -> None:
        """Do nothing: a peer leaves the exchange when it closes its link."""

    def close(self) -> None:
        self._exchange.inboxes.pop(self.name, None)


class Outbox:
    """Messages that one turn of a loop sends: one batch per peer."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._messages: dict[str, list[Message]] = {}

    def put(self, peer: str, message: Message) -> None:
        self._messages.setdefault(peer, []).append(message)

    def flush(self) -> None:
        for peer, messages in self._messages.items():
            self._link.send(peer, messages)
        self._messages.clear()
