"""Consort as a contestant: a coordinator in this process, and replicas in threads or in processes of their own."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Endpoint, Request, Statistics
from actors.loops.thread import LoopThread
from actors.replica import in_process
from actors.wire.link import LocalExchange, LocalLink
from actors.wire.messages import ReplicaAddress
from benchmarks.peers.contestant import Activity, Contestant, Workload
from benchmarks.peers.replica import MakeRunner, MeasuredReplica, Role, Sweep, Times, replica_process
from benchmarks.processes import Child, Host, Local
from engine.loading.checkpoint import ModelSpec
from engine.model.runner import Runner

if TYPE_CHECKING:
    from actors.wire.zmq_link import ConnectingZmqLink  # needs ZeroMQ, which a GPU machine may lack

_SETTLING_S = 0.05  # until replicas know that a request has ended


@dataclass(frozen=True, slots=True)
class Service:
    """A running coordinator."""

    coordinator: Coordinator
    check: Callable[[], None]  # raises if it has ended


class Consort(Contestant):
    """One endpoint of a running Consort."""

    def __init__(
        self,
        kind: Literal["alternation", "plain", "fixed", "adaptive", "colocated"],
        endpoint: Endpoint,
        service: Service,
        hosts: Sequence[Host[MeasuredReplica]],
        *,
        group: str = "Consort",
    ) -> None:
        """
        endpoint: its draft length is γ, or the maximum of an adaptive γ.
        hosts: the target, the drafter if there is one, and members.
        """
        most = endpoint.draft_length
        fixed = most if kind in ("alternation", "fixed") else None
        how = f"γ = {fixed}" if fixed else "plain" if kind == "plain" else f"adaptive, γ ≤ {most}"
        super().__init__(group, how, kind, hosts, draft_length=fixed)
        self.replicas = hosts
        self._endpoint, self._service, self._statistics = endpoint, service, Statistics()

    def run(self, workload: Workload) -> list[list[int]]:
        answers: list[list[int]] = []
        for prompts, params in workload.batches():
            pairs = zip(prompts, params, strict=True)
            requests = [Request(self._endpoint, prompt, prompt_params) for prompt, prompt_params in pairs]
            for deltas in in_process.generate(self._service.coordinator, requests, self._check):
                answers.append([token for delta in deltas for token in delta.token_ids])
                self._statistics += deltas[-1].statistics
        return answers

    def _check(self) -> None:
        """Raise UnavailableError if a loop has ended. Otherwise its requests would wait for their timeout."""
        self._service.check()
        for host in self.replicas:
            host.call(MeasuredReplica.check)

    def activity(self) -> Activity:
        time.sleep(_SETTLING_S)
        statistics, self._statistics = self._statistics, Statistics()
        for host in self.replicas:
            host.call(MeasuredReplica.clear_cache)
        times = [host.call(MeasuredReplica.take_times) for host in self.replicas]
        apart = self._endpoint.drafter is not None and not self._endpoint.colocated
        return Activity(statistics, *times[: 1 + apart])


@contextlib.contextmanager
def coordinating(
    link: "LocalLink | ConnectingZmqLink", replicas: Iterable[ReplicaAddress], *, max_silence_s: float = math.inf
) -> Iterator[Service]:
    """Run a coordinator in a thread. max_silence_s: infinite, because paused processes are silent."""
    coordinator = Coordinator(link, max_silence_s=max_silence_s)
    thread = LoopThread("coordinator", coordinator.turn, link.wake)
    thread.start()
    coordinator.set_replicas(replicas)
    try:
        yield Service(coordinator, thread.check)
    finally:
        thread.stop()
        link.close()


@contextlib.contextmanager
def in_threads(
    target: Runner, drafters: Mapping[str, MakeRunner], *, draft_lengths: Sequence[int], most: int
) -> Iterator[list[Consort]]:
    """Yield contestants: plain, alternation, and for each drafter one per fixed γ and an adaptive one. Needs no ZeroMQ.

    drafters: by name of the group, called in the thread that will run the model; the first alternates with the target,
    too. most: the limit of the adaptive γ.
    """
    exchange = LocalExchange()
    with contextlib.ExitStack() as stack:
        hosts: dict[str, Local[MeasuredReplica]] = {}

        def start(role: Role, name: str, make_runner: MakeRunner, colocated: MakeRunner | None = None) -> None:
            replica = MeasuredReplica(role, exchange.join(name), make_runner, colocated)
            stack.callback(replica.stop)
            hosts[name] = Local(replica)

        start("target", "fixed", lambda: target)
        start("target", "alternating", lambda: target, next(iter(drafters.values())))
        for group, make_drafter in drafters.items():
            start("drafter", group, make_drafter)
            start("adaptive-target", f"{group}, adaptive", lambda: target)
        addresses = [ReplicaAddress(name, name) for name in hosts]
        service = stack.enter_context(coordinating(exchange.join("coordinator"), addresses))
        contestants = [Consort("plain", _endpoint("fixed"), service, [hosts["fixed"]])]
        contestants += _alternation(service, hosts["alternating"], draft_lengths)
        for group in drafters:
            for γ in draft_lengths:
                pair = [hosts["fixed"], hosts[group]]
                contestants.append(Consort("fixed", _endpoint("fixed", group, γ), service, pair, group=group))
            name = f"{group}, adaptive"
            pair = [hosts[name], hosts[group]]
            contestants.append(Consort("adaptive", _endpoint(name, group, most), service, pair, group=group))
        yield contestants


def start_processes(plain: ModelSpec, target: ModelSpec, drafter: ModelSpec) -> list[Child[MeasuredReplica]]:
    """Start five targets and a drafter, which import in parallel. They load one after the other in `in_processes`.

    plain, target: the target by itself, and while a drafter runs in another process; they differ in threads.
    """
    return [
        replica_process("target", replace(plain, name="plain")),
        replica_process("target", replace(target, name="fixed")),
        replica_process("adaptive-target", replace(target, name="adaptive")),
        replica_process("drafter", replace(drafter, name="drafter")),
        replica_process("target", replace(plain, name="alternating"), replace(drafter, threads=None)),
        replica_process("adaptive-target", replace(plain, name="colocated"), replace(drafter, threads=None)),
    ]


@contextlib.contextmanager
def in_processes(
    processes: Sequence[Child[MeasuredReplica]], *, draft_lengths: Sequence[int], most: int
) -> Iterator[list[Consort]]:
    """Yield contestants: plain, alternation, one per fixed γ, adaptive with γ ≤ `most`, and with a colocated drafter.

    processes: of `start_processes`.
    """
    plain, fixed, adaptive, drafter, alternating, colocated = processes
    together = _endpoint("colocated", "drafter", most, colocated=True)
    with coordinating_processes(processes) as service:
        yield [
            Consort("plain", _endpoint("plain"), service, [plain]),
            *_alternation(service, alternating, draft_lengths),
            *(Consort("fixed", _endpoint("fixed", "drafter", γ), service, [fixed, drafter]) for γ in draft_lengths),
            Consort("adaptive", _endpoint("adaptive", "drafter", most), service, [adaptive, drafter]),
            Consort("colocated", together, service, [colocated], group="Consort, colocated drafter"),
        ]


@contextlib.contextmanager
def coordinating_processes(children: Sequence[Child[MeasuredReplica]]) -> Iterator[Service]:
    """Load and pause replicas one after the other, and run a coordinator for them."""
    from actors.wire.zmq_link import ConnectingZmqLink

    with contextlib.ExitStack() as stack:
        addresses: list[ReplicaAddress] = []
        for child in children:
            stack.enter_context(child)
            addresses.append(child.call(attrgetter("link.address")))
            child.pause()
        yield stack.enter_context(coordinating(ConnectingZmqLink("bench"), addresses))


def _alternation(service: Service, host: Host[MeasuredReplica], draft_lengths: Sequence[int]) -> list[Consort]:
    """Return what a drafter that runs apart is measured by: one that drafts γ tokens and waits for their verification.

    Leviathan et al., arXiv 2211.17192, algorithm 1, with Consort's loop, sampler and rule of acceptance.
    """
    endpoints = [_endpoint("alternating", "drafter", γ, colocated=True) for γ in draft_lengths]
    return [Consort("alternation", endpoint, service, [host], group="alternation") for endpoint in endpoints]


def _endpoint(target: str, drafter: str | None = None, γ: int = 0, *, colocated: bool = False) -> Endpoint:
    return Endpoint("bench", target, drafter, γ, lambda tokens: "", colocated=colocated)


def measure_times(plain: Consort, drafting: Consort, *, streams: int, draft_lengths: Sequence[int]) -> Times:
    """Measure the step times of idle contestants' replicas, one replica at a time."""
    sizes = sorted({1, *(γ + 1 for γ in draft_lengths)})

    def sweep(replica: Host[MeasuredReplica], sizes: Sequence[int]) -> Sweep:
        replica.resume()
        try:
            return replica.call(MeasuredReplica.sweep, rows=streams, sizes=sizes)
        finally:
            replica.pause()

    target, drafter = drafting.replicas
    return Times(sweep(plain.replicas[0], sizes), sweep(target, sizes), draft_step_s=sweep(drafter, [1])[1])


def swept_lengths(fixed: Sequence[int], most: int) -> list[int]:
    """Return the draft lengths whose steps are timed: the fixed ones, and some up to `most` for an adaptive γ."""
    return sorted({*fixed, *(γ for γ in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if γ < most), most})
