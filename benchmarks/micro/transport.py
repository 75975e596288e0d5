"""Transport of a member's logits to a leader on the same node: through a socket, and through shared memory.

Measures round trips: a request without content, a reply with the logits of a draft's positions, unpacked to float32. No
model runs.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actors.loops.thread import LoopThread
from actors.wire.logits_codec import LogitsTransport, SharedLogits, accept, offer, pack, unpack
from actors.wire.messages import Cancel, LogitsReply
from actors.wire.shared_memory import SharedOffer
from actors.wire.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from benchmarks.hosts import Child
from benchmarks.report import table, write

_VOCABULARIES = (8192, 32000, 152000)
_TRIPS = 10
_WAIT_S = 10.0


class LogitsServer:
    """Replies at once with prepared logits."""

    def __init__(self) -> None:
        self.link = ReplicaZmqLink("member", "127.0.0.1")
        self._memory: SharedLogits | None = None
        self._logits = torch.zeros(1, 1)
        self._thread = LoopThread("member", self._turn, self.link.wake)
        self._thread.start()

    def prepare(self, positions: int, vocab_size: int, dtype: str, shared: SharedOffer | None) -> None:
        """Prepare random logits for replies. shared: memory for them; None: send them in messages."""
        self._memory = None if shared is None else accept(shared)
        self._logits = torch.randn(positions, vocab_size).to(getattr(torch, dtype))

    def _turn(self) -> None:
        for peer, message in self.link.receive(0.1):
            if isinstance(message, Cancel):  # the request
                self.link.send(peer, [LogitsReply(1, 1, pack(self._logits, LogitsTransport(), self._memory), [])])

    def stop(self) -> None:
        """End the loop."""
        self._thread.stop()
        self.link.close()


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=_VOCABULARIES)
    parser.add_argument("--repetitions", type=int, default=5, help=f"of {_TRIPS} round trips")
    parser.add_argument("--output", type=Path, default=Path(".bench/transport.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    link = ConnectingZmqLink("leader")
    with Child(LogitsServer, threads=1) as member:
        address = member.call(attrgetter("link.address"))
        link.connect(address)
        ask = partial(_round_trip_ms, link, address.name)
        findings = [
            _measure(ask, member, *case, options.repetitions)
            for case in product((1, 5), options.vocabularies, ("float32", "bfloat16"))
        ]
        member.call(LogitsServer.stop)
    link.close()
    rows = []
    for finding in findings:
        socket_ms, shared_ms = finding["socket_ms"], finding["shared_ms"]
        spreads = (f"{median(ms):.2f} ({min(ms):.2f}–{max(ms):.2f})" for ms in (socket_ms, shared_ms))
        name = f"{finding['positions']} × {finding['vocab_size']} {finding['dtype']}"
        rows.append((name, str(finding["bytes"]), *spreads, f"{median(socket_ms) / median(shared_ms):.1f}"))
    print(table(("logits", "bytes", "socket, ms", "shared, ms", "socket / shared"), rows))
    write(options.output, "benchmarks.micro.transport", vars(options), findings=findings)


def _measure(
    ask: Callable[[SharedLogits], float],
    member: Child[LogitsServer],
    positions: int,
    vocab_size: int,
    dtype: str,
    repetitions: int,
) -> dict[str, Any]:
    """Measure both ways, alternating. ask: makes a round trip and returns its milliseconds."""
    size = positions * vocab_size * getattr(torch, dtype).itemsize
    offered = offer(size)
    assert offered is not None, "this system has no anonymous files"
    memory, shared = offered
    times: dict[str, list[float]] = {"socket_ms": [], "shared_ms": []}
    for repetition in range(repetitions + 1):
        for way in times:
            member.call(LogitsServer.prepare, positions, vocab_size, dtype, shared if way == "shared_ms" else None)
            trips_ms = [ask(memory) for _ in range(_TRIPS)]
            times[way] += [median(trips_ms)] if repetition else []
    memory.withdraw()
    return {"positions": positions, "vocab_size": vocab_size, "dtype": dtype, "bytes": size, **times}


def _round_trip_ms(link: ConnectingZmqLink, member: str, memory: SharedLogits) -> float:
    began_s = time.perf_counter()
    link.send(member, [Cancel(1)])
    _, message = link.receive(_WAIT_S)[0]
    assert isinstance(message, LogitsReply)
    unpack(message.logits, memory=memory).clone()
    return (time.perf_counter() - began_s) * 1e3


if __name__ == "__main__":
    main()
