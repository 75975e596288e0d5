"""A Consort of processes, as Ray would place them, but without Ray: four targets, a drafter, a coordinator here."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from transformers.utils import logging

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Endpoint
from actors.loading.checkpoint import ModelSpec
from actors.loops.thread import LoopThread
from actors.replica.replica import load_runner
from actors.wire.addresses import ReplicaAddress
from actors.wire.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from benchmarks.peers.hosts import Child
from benchmarks.peers.ours import Ours
from benchmarks.peers.replica import MeasuredReplica, Role


@dataclass(frozen=True, slots=True)
class Models:
    """What every contestant loads, and how many threads it may use. `slots` must reach for the most streams."""

    target: ModelSpec
    drafter: ModelSpec
    threads: int  # of a contestant that computes one thing at a time
    target_threads: int  # of a target with a drafter beside it
    drafter_threads: int


class Consort:
    """Started by `with`: the replicas' processes begin to import at once, and load one after the other."""

    def __init__(self, models: Models) -> None:
        plain = replace(models.target, name="plain", threads=models.threads)
        beside = replace(models.target, threads=models.target_threads)
        drafter = replace(models.drafter, name="drafter", threads=models.drafter_threads)
        self.plain = _child("target", plain)
        self.fixed = _child("target", replace(beside, name="fixed"))
        self.adaptive = _child("adaptive-target", replace(beside, name="adaptive"))
        self.drafter = _child("drafter", drafter)
        self.inside = _child("adaptive-target", replace(plain, name="inside"), replace(drafter, threads=None))

    @contextlib.contextmanager
    def running(self, draft_lengths: Sequence[int], most: int) -> Iterator[list[Ours]]:
        """Contestants: plain, one per fixed γ, adaptive with γ ≤ `most`, and that with the drafter inside the target.

        The others share a drafter.
        """
        with contextlib.ExitStack() as stack:
            addresses: list[ReplicaAddress] = []
            for child in (self.plain, self.fixed, self.adaptive, self.drafter, self.inside):
                stack.enter_context(child)
                addresses.append(child.call(attrgetter("link.address")))
                child.pause()
            link = ConnectingZmqLink("bench")
            stack.callback(link.close)
            coordinator = Coordinator(link, max_silence_s=math.inf)  # who is paused is silent
            thread = LoopThread("coordinator", coordinator.turn, link.wake)
            thread.start()
            stack.callback(thread.stop)
            coordinator.set_replicas(addresses)

            def endpoint(target: str, draft_length: int) -> Endpoint:
                drafter, inside = "drafter" if draft_length else None, target == "inside"
                return Endpoint("bench", target, drafter, draft_length, lambda tokens: "", colocated=inside)

            yield [
                Ours("plain", endpoint("plain", 0), coordinator, thread.check, self.plain, None),
                *(
                    Ours("fixed", endpoint("fixed", γ), coordinator, thread.check, self.fixed, self.drafter)
                    for γ in draft_lengths
                ),
                Ours("adaptive", endpoint("adaptive", most), coordinator, thread.check, self.adaptive, self.drafter),
                Ours(
                    "inside",
                    endpoint("inside", most),
                    coordinator,
                    thread.check,
                    self.inside,
                    None,
                    group="Consort, drafter inside",
                ),
            ]


def _child(role: Role, spec: ModelSpec, inside: ModelSpec | None = None) -> Child[MeasuredReplica]:
    assert spec.threads is not None
    return Child(partial(_open, role, spec, inside), threads=spec.threads)


def _open(role: Role, spec: ModelSpec, inside: ModelSpec | None) -> MeasuredReplica:
    logging.disable_progress_bar()
    link = ReplicaZmqLink(spec.name, "127.0.0.1")
    make_inside = None if inside is None else partial(load_runner, inside)
    return MeasuredReplica(role, link, partial(load_runner, spec), make_inside)
