"""Consort in threads of this process, on local links, for a drafter on the target's GPU or on the CPU.

Unlike actors/replica/in_process.py it needs no ZeroMQ, can fix γ, and runs several loops over one model, one at a time.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Endpoint
from actors.loops.thread import LoopThread
from actors.wire.link import LocalExchange
from actors.wire.messages import ReplicaAddress
from benchmarks.peers.hosts import Local
from benchmarks.peers.ours import Ours
from benchmarks.peers.replica import MeasuredReplica, Role
from engine.model.runner import Runner

MakeRunner = Callable[[], Runner]  # called in the thread that will run the model


@contextlib.contextmanager
def running(
    target: Runner, drafters: Mapping[str, MakeRunner], *, draft_lengths: Sequence[int], most: int
) -> Iterator[list[Ours]]:
    """Yield contestants: plain, then for each drafter one per fixed γ and an adaptive one.

    drafters: runners by name of the group. most: the limit of the adaptive γ.
    """
    exchange = LocalExchange()
    with contextlib.ExitStack() as stack:
        link = exchange.join("coordinator")
        coordinator = Coordinator(link)
        thread = LoopThread("coordinator", coordinator.turn, link.wake)
        thread.start()
        stack.callback(thread.stop)
        names: list[str] = []

        def start(role: Role, name: str, make_runner: MakeRunner) -> Local[MeasuredReplica]:
            replica = MeasuredReplica(role, exchange.join(name), make_runner)
            stack.callback(replica.stop)
            names.append(name)
            return Local(replica)

        fixed = start("target", "fixed", lambda: target)
        contestants = [Ours("plain", _endpoint("fixed", None, 0), coordinator, thread.check, fixed, None)]
        for group, make_drafter in drafters.items():
            drafter = start("drafter", group, make_drafter)
            adaptive = start("adaptive-target", f"{group}, adaptive", lambda: target)
            for γ in draft_lengths:
                endpoint = _endpoint("fixed", group, γ)
                contestants.append(Ours("fixed", endpoint, coordinator, thread.check, fixed, drafter, group=group))
            endpoint = _endpoint(f"{group}, adaptive", group, most)
            contestants.append(Ours("adaptive", endpoint, coordinator, thread.check, adaptive, drafter, group=group))
        coordinator.set_replicas(ReplicaAddress(name, name) for name in names)
        yield contestants


def _endpoint(target: str, drafter: str | None, draft_length: int) -> Endpoint:
    return Endpoint("bench", target, drafter, draft_length, lambda tokens: "")
