"""One replica that is a target and a drafter at once: both loops in one thread, over one copy of the weights.

Each has KV slots of its own, and knows nothing of the other. To its peers it is one replica at one address: messages
say by their kind which loop they are for, and both loads are reported as one.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from actors.drafter.loop import Drafter
from actors.loops.thread import LoopTimes
from actors.target.loop import Target
from actors.wire.addresses import ReplicaAddress
from actors.wire.link import ConnectingLink, Envelope
from actors.wire.messages import Admit, Advance, Cancel, Heartbeat, Message, Report


class SharedWeightsLoop:
    """A target and a drafter, which take turns. The target's answers come first: others wait for them."""

    def __init__(
        self,
        link: ConnectingLink,
        make_target: Callable[[ConnectingLink], Target],
        make_drafter: Callable[[ConnectingLink], Drafter],
    ) -> None:
        self._link = link
        self._connections: Counter[str] = Counter()  # how many of the two need each
        self._targets_share = _Share(link, self._receive_for_target, self._whole, self._connections)
        self._drafters_share = _Share(link, self._receive_for_drafter, lambda peer, report: None, self._connections)
        self._target, self._drafter = make_target(self._targets_share), make_drafter(self._drafters_share)

    @property
    def times(self) -> LoopTimes:
        """Where the time of both went."""
        return self._target.times + self._drafter.times

    def load(self) -> Report:
        """The load of both at this moment; any thread may ask."""
        return _together(self._target.load(), self._drafter.load())

    def turn(self) -> None:
        """A turn of each."""
        self._target.turn()
        self._drafter.turn()

    def _receive_for_target(self, timeout_s: float) -> None:
        """Here both wait: the target as long as it likes, if the drafter has nothing to do."""
        self._receive(min(timeout_s, 0.0 if self._drafters_share.inbox else self._drafter.timeout_s()))

    def _receive_for_drafter(self, timeout_s: float) -> None:
        self._receive(0.0)

    def _receive(self, timeout_s: float) -> None:
        for envelope in self._link.receive(timeout_s):
            for share in self._shares_of(envelope[1]):
                share.inbox.append(envelope)

    def _shares_of(self, message: Message) -> "list[_Share]":
        match message:
            case Cancel() | Heartbeat():
                return [self._targets_share, self._drafters_share]
            case Advance() | Admit(drafts_only=True):
                return [self._drafters_share]
            case _:
                return [self._targets_share]

    def _whole(self, peer: str, report: Report) -> Report:
        return _together(report, self._drafter.load(peer))


class _Share:
    """One loop's part of the link. Of the reports, only the target's are sent, with the drafter's load in them."""

    def __init__(
        self,
        link: ConnectingLink,
        receive: Callable[[float], None],
        reported: Callable[[str, Report], Report | None],
        connections: Counter[str],
    ) -> None:
        """
        receive: waits up to so many seconds for messages.
        reported: what to send for a report to a peer.
        connections: of the link, by how many of its shares need each.
        """
        self.name = link.name
        self.inbox: list[Envelope] = []
        self._link, self._receive, self._reported, self._connections = link, receive, reported, connections

    @property
    def malformed(self) -> int:
        return self._link.malformed

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        reported = [self._reported(peer, one) if isinstance(one, Report) else one for one in messages]
        kept = [one for one in reported if one is not None]
        if kept:
            self._link.send(peer, kept)

    def receive(self, timeout_s: float) -> list[Envelope]:
        self._receive(0.0 if self.inbox else timeout_s)
        received, self.inbox = self.inbox, []
        return received

    def wake(self) -> None:
        self._link.wake()

    def connect(self, address: ReplicaAddress) -> None:
        self._connections[address.name] += 1
        if self._connections[address.name] == 1:
            self._link.connect(address)

    def disconnect(self, peer: str) -> None:
        self._connections[peer] -= 1
        if self._connections[peer] <= 0:
            del self._connections[peer]
            self._link.disconnect(peer)

    def close(self) -> None:
        """Nothing to do: the link is the replica's."""


def _together(target: Report, drafter: Report) -> Report:
    """Requests that wait for a slot of the target come last, as in its own report."""
    return Report(
        active=target.active + drafter.active,
        waiting=target.waiting + drafter.waiting,
        slots=target.slots + drafter.slots,
        request_ids=drafter.request_ids + target.request_ids,
        drafting=target.drafting,
        attached_drafters=target.attached_drafters,
        speculation_gain=target.speculation_gain,
    )


Loop = Target | Drafter | SharedWeightsLoop  # of a model's replica
