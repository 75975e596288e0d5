"""A replica without a model: the test reads its messages and sends for it."""

from actors.wire.link import LocalExchange
from actors.wire.messages import Message, ReplicaAddress


class FakeReplica:
    """A local link that a test drives."""

    def __init__(self, exchange: LocalExchange, name: str, model: str) -> None:
        self.address = ReplicaAddress(name, model)
        self._link = exchange.join(name)

    def received(self) -> list[Message]:
        """Return the messages since the last call."""
        return [message for _, message in self._link.receive(0)]

    def say(self, *messages: Message) -> None:
        self._link.send("coordinator", messages)
