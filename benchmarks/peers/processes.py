"""Consort in several processes without Ray: four targets and a drafter; the coordinator runs in this process."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from transformers.utils import logging

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Endpoint
from actors.loops.thread import LoopThread
from actors.replica.replica import load_runner
from actors.wire.messages import ReplicaAddress
from actors.wire.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from benchmarks.peers.hosts import Child
from benchmarks.peers.ours import Ours
from benchmarks.peers.replica import MeasuredReplica, Role
from engine.loading.checkpoint import ModelSpec


@dataclass(frozen=True, slots=True)
class Models:
    """The models that every contestant loads, and its numbers of threads. Each model needs a slot per stream."""

    target: ModelSpec
    drafter: ModelSpec
    threads: int  # of a contestant that runs one model at a time
    target_threads: int  # of a target while a drafter runs in another process
    drafter_threads: int


class Consort:
    """The processes of the replicas. They import in parallel, and load one after the other in `running`."""

    def __init__(self, models: Models) -> None:
        plain = replace(models.target, name="plain", threads=models.threads)
        disaggregated = replace(models.target, threads=models.target_threads)
        drafter = replace(models.drafter, name="drafter", threads=models.drafter_threads)
        self.plain = _child("target", plain)
        self.fixed = _child("target", replace(disaggregated, name="fixed"))
        self.adaptive = _child("adaptive-target", replace(disaggregated, name="adaptive"))
        self.drafter = _child("drafter", drafter)
        self.colocated = _child("adaptive-target", replace(plain, name="colocated"), replace(drafter, threads=None))

    @contextlib.contextmanager
    def running(self, draft_lengths: Sequence[int], most: int) -> Iterator[list[Ours]]:
        """Yield contestants: plain, one per fixed γ, adaptive with γ ≤ `most`, and adaptive with a colocated drafter.

        All but the last share a drafter.
        """
        with contextlib.ExitStack() as stack:
            addresses: list[ReplicaAddress] = []
            for child in (self.plain, self.fixed, self.adaptive, self.drafter, self.colocated):
                stack.enter_context(child)
                addresses.append(child.call(attrgetter("link.address")))
                child.pause()
            link = ConnectingZmqLink("bench")
            stack.callback(link.close)
            coordinator = Coordinator(link, max_silence_s=math.inf)  # paused processes are silent
            thread = LoopThread("coordinator", coordinator.turn, link.wake)
            thread.start()
            stack.callback(thread.stop)
            coordinator.set_replicas(addresses)

            def endpoint(target: str, draft_length: int) -> Endpoint:
                drafter, colocated = "drafter" if draft_length else None, target == "colocated"
                return Endpoint("bench", target, drafter, draft_length, lambda tokens: "", colocated=colocated)

            yield [
                Ours("plain", endpoint("plain", 0), coordinator, thread.check, self.plain, None),
                *(
                    Ours("fixed", endpoint("fixed", γ), coordinator, thread.check, self.fixed, self.drafter)
                    for γ in draft_lengths
                ),
                Ours("adaptive", endpoint("adaptive", most), coordinator, thread.check, self.adaptive, self.drafter),
                Ours(
                    "colocated",
                    endpoint("colocated", most),
                    coordinator,
                    thread.check,
                    self.colocated,
                    None,
                    group="Consort, colocated drafter",
                ),
            ]


def _child(role: Role, spec: ModelSpec, colocated: ModelSpec | None = None) -> Child[MeasuredReplica]:
    assert spec.threads is not None
    return Child(partial(open_replica, role, spec, colocated), threads=spec.threads)


def open_replica(role: Role, spec: ModelSpec, colocated: ModelSpec | None) -> MeasuredReplica:
    """Make a replica with a ZeroMQ link of its own. colocated: a drafter in the target's process."""
    logging.disable_progress_bar()
    link = ReplicaZmqLink(spec.name, "127.0.0.1")
    make_colocated = None if colocated is None else partial(load_runner, colocated)
    return MeasuredReplica(role, link, partial(load_runner, spec), make_colocated)
