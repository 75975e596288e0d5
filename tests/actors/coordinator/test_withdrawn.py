"""Replicas that are withdrawn while they work, with real sockets and loops."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
from torch import Tensor

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.loops.thread import LoopThread
from actors.replica.replica import Replica
from actors.replica.roles import Role, make_loop
from actors.wire.messages import ReplicaAddress
from actors.wire.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import tiny_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)
_PATIENCE_S = 10.0  # docs/failures.md promises one second, where nothing else keeps the machine busy
_STEP_S = 0.1


class SlowRunner(Runner):
    """So slow that work would go on for long if it were not cancelled."""

    def logits(self, rows: Sequence[RowInput]) -> Tensor:
        time.sleep(_STEP_S)
        return super().logits(rows)


class Fleet:
    """A coordinator and replicas. Names begin with "t" for targets, "m" for members and "d" for drafters."""

    def __init__(self) -> None:
        self.replicas: dict[str, Any] = {}
        self.addresses: dict[str, ReplicaAddress] = {}
        self.deltas: list[Delta] = []
        self._link = ConnectingZmqLink("coordinator")
        self.coordinator = Coordinator(self._link)
        self._thread = LoopThread("coordinator", self.coordinator.turn, self._link.wake)
        self._thread.start()

    def start(self, *names: str) -> None:
        for name in names:
            role: Role = "drafter" if name[0] == "d" else "target"
            link = ReplicaZmqLink(name[0], "127.0.0.1")
            runner = (SlowRunner if name[0] == "t" else Runner)(
                tiny_model("llama-gqa"), slots=4, max_length=250, max_query=64
            )
            replica = cast(Any, Replica.__new__(Replica))  # without a checkpoint to load
            replica._link, replica._loop = link, make_loop(role, runner, link, LoopOptions(prefill_chunk=64))
            replica._thread = LoopThread(name, replica._loop.turn, link.wake)
            replica._adaptation = None
            replica._thread.start()
            self.replicas[name], self.addresses[name] = replica, link.address

    def set_replicas(self, *names: str) -> None:
        self.coordinator.set_replicas(self.addresses[name] for name in names)

    def submit(self, endpoint: Endpoint) -> None:
        params = SamplingParams(max_tokens=200, temperature=0)
        self.coordinator.submit(Request(endpoint, [1, 2, 3], params), self.deltas.append)
        wait_until(lambda: len(self.deltas) > 3, "some tokens")

    def is_busy(self, name: str) -> bool:
        return bool(self.replicas[name].report().active)

    def check(self) -> None:
        for replica in self.replicas.values():
            replica.check()
        self._thread.check()

    def close(self) -> None:
        self._thread.stop()
        self._link.close()
        for replica in self.replicas.values():
            replica.stop()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with _closing(Fleet()) as fleet:
        yield fleet


@contextmanager
def _closing(fleet: Fleet) -> Iterator[Fleet]:
    try:
        yield fleet
        fleet.check()
    finally:
        fleet.close()


def decode(tokens: list[int]) -> str:
    return "x" * len(tokens)


def test_a_target_and_a_drafter_are_free_at_once_and_may_stop(fleet: Fleet) -> None:
    fleet.start("t1", "d1")
    fleet.set_replicas("t1", "d1")
    fleet.submit(Endpoint("e", "t", "d", 4, decode))
    fleet.start("t2", "d2")
    fleet.set_replicas("t1", "d1", "t2", "d2")
    assert fleet.is_busy("t1")
    fleet.set_replicas("t2", "d2")
    for name in ("t1", "d1"):
        wait_until(lambda name=name: not fleet.is_busy(name), f"{name} to be free", timeout_s=_PATIENCE_S)  # type: ignore[misc]
    wait_until(lambda: fleet.is_busy("t2"), "the request to go on")
    began_s = time.monotonic()
    fleet.replicas.pop("t1").drain(timeout_s=25)
    assert time.monotonic() - began_s < 20  # 2.5 s are for all coordinators to learn of it


def test_a_member_that_is_dropped_is_free_at_once(fleet: Fleet) -> None:
    fleet.start("t1", "m1")
    fleet.set_replicas("t1", "m1")
    options = EnsembleOptions(blend=BlendParams(), on_member_failure="drop")
    fleet.submit(Endpoint("e", "t", None, 0, decode, members=["m"], ensemble=options))
    assert fleet.is_busy("m1")
    fleet.set_replicas("t1")
    wait_until(lambda: not fleet.is_busy("m1"), "m1 to be free", timeout_s=_PATIENCE_S)
    assert fleet.is_busy("t1")
