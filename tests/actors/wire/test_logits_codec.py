"""Logits in memory that a leader and a member share: they arrive unchanged, and foreign memory is refused."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from msgspec.structs import replace

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Request
from actors.loops.thread import LoopThread
from actors.replica.in_process import generate
from actors.verifier.loop import Target
from actors.wire.logits_codec import SharedLogits, accept, offer, pack, unpack
from actors.wire.messages import LogitsTransport, PackedLogits, ReplicaAddress
from actors.wire.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from decoding.blending.params import BlendParams
from engine.model.runner import Runner
from tests.in_process.test_ensemble import MODELS, PROMPTS, ensemble, params, reference, tokens
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are Linux's")

ROOM = 5 * 40 * 4


def _open_files() -> list[str]:
    gc.collect()
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # other threads close theirs meanwhile
            names.append(str(link.readlink()))
    return [name for name in names if "consort-" in name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("transport", ["float32", "bfloat16"])
def test_shared_logits_arrive_unchanged(dtype: str, transport: str) -> None:
    offered = offer(ROOM)
    assert offered is not None
    leader_memory, handle = offered
    member_memory = accept(handle)
    assert member_memory is not None
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    options = LogitsTransport(dtype=transport)  # type: ignore[arg-type]
    for part in (logits, logits[:2]):
        packed = pack(part, options, member_memory)
        assert packed.shared
        assert not packed.values
        assert unpack(packed, memory=leader_memory).equal(unpack(pack(part, options)))
    leader_memory.withdraw()
    del member_memory, leader_memory, offered
    assert not _open_files()


def test_logits_that_do_not_fit_are_sent_as_bytes() -> None:
    offered = offer(ROOM)
    assert offered is not None
    memory, _ = offered
    assert not pack(torch.zeros(6, 40), LogitsTransport(), memory).shared
    assert not pack(torch.zeros(2, 40), LogitsTransport(top_k=3), memory).shared
    for positions, vocab_size, room in ((6, 40, memory), (0, 40, memory), (-1, -40, memory), (5, 40, None)):
        with pytest.raises(ValueError, match="logits"):
            unpack(PackedLogits(positions, vocab_size, "float32", b"", shared=True), memory=room)
    memory.withdraw()


def test_memory_that_the_leader_did_not_offer_is_refused() -> None:
    offered = offer(ROOM)
    assert offered is not None
    memory, handle = offered
    other = os.memfd_create("other")
    unsealed = os.memfd_create("consort-unsealed")
    try:
        os.ftruncate(unsealed, ROOM)
        for change in (
            {"name": "0" * 32},
            {"descriptor": other, "name": "other"},
            {"descriptor": unsealed, "name": "unsealed"},
            {"descriptor": 10_000},
            {"pid": 2**30},
            {"size": 100 * ROOM},
            {"size": -1},
        ):
            assert accept(replace(handle, **change)) is None
    finally:
        os.close(other)
        os.close(unsealed)
    memory.withdraw()
    assert accept(handle) is None


def _check(threads: list[LoopThread]) -> None:
    for thread in threads:
        thread.check()


@contextmanager
def over_sockets() -> Iterator[tuple[Coordinator, list[LoopThread]]]:
    """Run two targets that are linked by sockets, as separate processes are."""
    link = ConnectingZmqLink("coordinator")
    coordinator = Coordinator(link)
    threads = [LoopThread("coordinator", coordinator.turn, link.wake)]
    addresses: list[ReplicaAddress] = []
    with ExitStack() as stack:
        stack.callback(link.close)
        for name in ("first", "second"):
            replica = ReplicaZmqLink(name, "127.0.0.1")
            stack.callback(replica.close)
            target = Target(Runner(MODELS[name], slots=4, max_length=64, max_query=32), replica)
            threads.append(LoopThread(name, target.turn, replica.wake))
            addresses.append(replica.address)
        for thread in threads:
            thread.start()
            stack.callback(thread.stop)
        coordinator.set_replicas(addresses)
        wait_until(lambda: len(coordinator.models()) == 2, "replicas")
        yield coordinator, threads


def test_a_member_on_the_same_node_sends_logits_through_shared_memory() -> None:
    packed: list[PackedLogits] = []

    def spy(logits: torch.Tensor, transport: LogitsTransport, memory: SharedLogits | None = None) -> PackedLogits:
        packed.append(pack(logits, transport, memory))
        return packed[-1]

    with mock.patch("actors.ensemble.member.pack", spy), over_sockets() as (coordinator, threads):
        requests = [Request(ensemble(BlendParams()), prompt, params(i)) for i, prompt in enumerate(PROMPTS[:3])]
        answers = generate(coordinator, requests, partial(_check, threads))
        wait_until(lambda: not _open_files(), "descriptors to be closed")
    expected = [reference(("first", "second"), BlendParams(), request.prompt, request.params) for request in requests]
    assert [tokens(answer) for answer in answers] == expected
    assert packed
    assert all(logits.shared for logits in packed)
