"""The roles of a replica and the loop of each. In the role "both", two loops share one copy of the weights.

Peers see one replica at one address: the type of a message says which loop it is for, and one report covers both.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec.structs import replace

from actors.drafter.loop import Drafter
from actors.loops.options import LoopOptions
from actors.loops.thread import LoopTimes
from actors.verifier.loop import Target
from actors.wire.link import Envelope, Link
from actors.wire.messages import Admit, Advance, Cancel, Heartbeat, Message, ReplicaAddress, Report
from engine.model.runner import Runner

Role = Literal["target", "drafter", "both"]


class SharedWeightsLoop:
    """A target and a drafter, alternating. The target goes first, because others wait for its tokens."""

    def __init__(self, runner: Runner, link: Link, options: LoopOptions = LoopOptions()) -> None:
        """runner: the target's; a shared-weight copy of it drafts."""
        drafter_runner = runner.shared_copy()
        self._link = link
        connections: Counter[str] = Counter()
        self._target_link = _SharedLink(link, self._receive_for_target, self._report, connections)
        self._drafter_link = _SharedLink(
            link, lambda timeout_s: self._receive(0.0), lambda peer, report: None, connections
        )
        self._target = Target(runner, self._target_link, options)
        self._drafter = Drafter(drafter_runner, self._drafter_link, options)
        self._weights = self._target.weights

    @property
    def times(self) -> LoopTimes:
        return self._target.times + self._drafter.times

    def load(self) -> Report:
        """Return the load of both at this moment; any thread may call it."""
        return _combine(self._target.load(), self._drafter.load())

    def turn(self) -> None:
        self._target.turn()
        if self._target.weights != self._weights:
            self._weights = self._target.weights
            self._drafter.forget_texts()
        self._drafter.turn()

    def _receive_for_target(self, timeout_s: float) -> None:
        """Receive for both; wait as long as the target allows, if the drafter has nothing to do."""
        self._receive(min(timeout_s, 0.0 if self._drafter_link.inbox else self._drafter.timeout_s()))

    def _receive(self, timeout_s: float) -> None:
        for envelope in self._link.receive(timeout_s):
            for link in self._receivers(envelope[1]):
                link.inbox.append(envelope)

    def _receivers(self, message: Message) -> "list[_SharedLink]":
        match message:
            case Cancel() | Heartbeat():
                return [self._target_link, self._drafter_link]
            case Advance() | Admit(drafts_only=True):
                return [self._drafter_link]
            case _:
                return [self._target_link]

    def _report(self, peer: str, report: Report) -> Report:
        return _combine(report, self._drafter.load(peer))


class _SharedLink:
    """One loop's view of the replica's link."""

    def __init__(
        self,
        link: Link,
        receive: Callable[[float], None],
        make_report: Callable[[str, Report], Report | None],
        connections: Counter[str],
    ) -> None:
        """
        receive: fills the inboxes; waits up to that many seconds for messages.
        make_report: returns what to send in place of a report to a peer; None: nothing.
        connections: how many of the loops need a connection to each peer.
        """
        self.name = link.name
        self.inbox: list[Envelope] = []
        self._link, self._receive, self._make_report, self._connections = link, receive, make_report, connections

    @property
    def malformed(self) -> int:
        return self._link.malformed

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        outgoing = [self._make_report(peer, item) if isinstance(item, Report) else item for item in messages]
        kept = [message for message in outgoing if message is not None]
        if kept:
            self._link.send(peer, kept)

    def receive(self, timeout_s: float) -> list[Envelope]:
        self._receive(0.0 if self.inbox else timeout_s)
        received, self.inbox = self.inbox, []
        return received

    def reaches(self, peer: str) -> bool:
        return self._link.reaches(peer)

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


def _combine(target: Report, drafter: Report) -> Report:
    """Add two loads. Requests that wait for a slot of the target come last, as in its own report.

    The drafter's slots count as far as they are in use, so that free slots are the target's.
    """
    return replace(
        target,
        active=target.active + drafter.active,
        waiting=target.waiting + drafter.waiting,
        slots=target.slots + drafter.active + drafter.waiting,
        request_ids=drafter.request_ids + target.request_ids,
        pages=target.pages + drafter.pages,
        used_pages=target.used_pages + drafter.used_pages,
        shared_pages=target.shared_pages + drafter.shared_pages,
    )


Loop = Target | Drafter | SharedWeightsLoop


def make_loop(role: Role, runner: Runner, link: Link, options: LoopOptions = LoopOptions()) -> Loop:
    """Return the loop of that role. With the role "both", a shared-weight copy of the runner drafts."""
    match role:
        case "target":
            return Target(runner, link, options)
        case "drafter":
            return Drafter(runner, link, options)
        case "both":
            return SharedWeightsLoop(runner, link, options)
