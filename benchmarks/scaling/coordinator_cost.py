"""CPU time of a coordinator per batch, per verdict and per 1,000 committed tokens.

A real coordinator on real links. The same thread plays the replicas; their time is not counted.
"""

import cProfile
import pstats
import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Endpoint, Request
from actors.wire.messages import Admit, Commit, Message, Token
from actors.wire.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from decoding.sampling.params import SamplingParams
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.endpoints.loading import load_endpoints

_DELIVERY_S = 0.003
_COMMITTED = 3  # tokens per verdict


@dataclass(frozen=True, slots=True)
class CoordinatorCost:
    """CPU seconds of one coordinator."""

    rows: int
    thread_s_per_1000_tokens: float
    network_s_per_1000_tokens: float  # in ZeroMQ's own thread, which encrypts
    thread_s_per_round: float


class _Bench:
    def __init__(self) -> None:
        self._ends = [ReplicaZmqLink(name, "127.0.0.1") for name in ("target", "drafter")]
        link = ConnectingZmqLink("bench")
        self._name = link.name
        self.coordinator = Coordinator(link, max_requests=1000)
        self.coordinator.set_replicas(end.address for end in self._ends)
        self._all = [*self._ends, link]
        self.thread_s = 0.0
        self.turn()

    def turn(self) -> None:
        """Run and time one turn of the coordinator."""
        time.sleep(_DELIVERY_S)
        began_s = time.thread_time()
        self.coordinator.turn()
        self.thread_s += time.thread_time() - began_s

    def send(self, end: int, messages: Sequence[Message]) -> None:
        self._ends[end].send(self._name, messages)

    def receive(self, end: int) -> list[Message]:
        return [message for _, message in self._ends[end].receive(0.05)]

    def close(self) -> None:
        for link in self._all:
            link.close()


def measure(*, rows: int, rounds: int, profile: cProfile.Profile | None = None) -> CoordinatorCost:
    """Measure rounds of one batch with a verdict for each row."""
    endpoint = load_endpoints(load_config(TINY_CONFIG))["consort"].endpoint
    endpoint = Endpoint("bench", "target", "drafter", 4, endpoint.decode)
    bench = _Bench()
    try:
        for row in range(rows):
            params = SamplingParams(max_tokens=_COMMITTED * (rounds + 2), temperature=0)
            bench.coordinator.submit(Request(endpoint, list(range(10, 110)), params, request_id=row), _ignore)
        bench.turn()
        admitted = 0
        while admitted < rows:
            admitted += sum(isinstance(message, Admit) for message in bench.receive(0))
        bench.receive(1)
        bench.thread_s, began_s, own_s = 0.0, time.process_time(), time.thread_time()
        if profile is not None:
            profile.enable()
        for done in range(rounds):
            _round(bench, rows, 100 + _COMMITTED * done)
        if profile is not None:
            profile.disable()
        network_s = (time.process_time() - began_s - (time.thread_time() - own_s)) / 2  # of both ends of every link
        per_1000 = 1000 / (rounds * rows * _COMMITTED)
        return CoordinatorCost(rows, bench.thread_s * per_1000, network_s * per_1000, bench.thread_s / rounds)
    finally:
        bench.close()


def _round(bench: _Bench, rows: int, base: int) -> None:
    tokens = [Token(300, "accepted", "drafter"), Token(301, "accepted", "drafter"), Token(302, "recovered")]
    bench.send(0, [Commit(row, base, tokens, None, 4) for row in range(rows)])
    bench.turn()


def _ignore(delta: Delta) -> None:
    assert delta.error is None, delta.error


def print_profile(*, rows: int, rounds: int) -> None:
    """Print the functions that take most of the time."""
    profile = cProfile.Profile(time.thread_time)
    measure(rows=rows, rounds=rounds, profile=profile)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    for rows in (1, 4, 8, 16, 32):
        costs = sorted(measure(rows=rows, rounds=100).thread_s_per_1000_tokens for _ in range(5))
        print(f"{rows} rows: {costs[2]:.1%} of a core per 1,000 tokens/s ({costs[0]:.1%} to {costs[-1]:.1%})")
    print_profile(rows=8, rounds=100)
