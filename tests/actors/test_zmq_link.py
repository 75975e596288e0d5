"""Real sockets on the loopback interface."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from socket import create_connection

import pytest
import zmq

from actors import zmq_link
from actors.link import Envelope, Link
from actors.messages import Admit, Cancel, Message, Offer, Report
from actors.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from benchmarks.chaos_proxy import Relays
from decoding.params import SamplingParams
from tests.support.waiting import wait_until


@pytest.fixture
def replica() -> Iterator[ReplicaZmqLink]:
    with closing(ReplicaZmqLink("r1", "model", "127.0.0.1")) as link:
        yield link


@contextmanager
def connected(replica: ReplicaZmqLink, name: str = "c1") -> Iterator[ConnectingZmqLink]:
    with closing(ConnectingZmqLink(name)) as link:
        link.connect(replica.address)
        yield link


def receive(link: Link, count: int) -> list[Envelope]:
    """Exactly so many messages, however they are batched."""
    envelopes: list[Envelope] = []

    def enough() -> bool:
        envelopes.extend(link.receive(0.05))
        return len(envelopes) >= count

    wait_until(enough, f"{count} messages")
    assert len(envelopes) == count
    return envelopes


def offers(count: int) -> list[Message]:
    return [Offer(i, i, [i, i + 1]) for i in range(count)]


def test_messages_arrive_in_order_both_ways(replica: ReplicaZmqLink) -> None:
    admit = Admit(2**63 - 1, [1, 2], 2, SamplingParams(max_tokens=3, stop=("é",), eos_token_ids=(2,)), 4, drafter=True)
    with connected(replica) as coordinator:
        coordinator.send("r1", [admit])
        for offer in offers(300):
            coordinator.send("r1", [offer])
        assert receive(replica, 301) == [("c1", admit), *(("c1", offer) for offer in offers(300))]
        replica.send("c1", offers(300))
        assert receive(coordinator, 300) == [("r1", offer) for offer in offers(300)]


def test_each_peer_gets_its_own(replica: ReplicaZmqLink) -> None:
    with connected(replica, "c1") as first, connected(replica, "c2") as second, ExitStack() as stack:
        other = stack.enter_context(closing(ReplicaZmqLink("r2", "model", "127.0.0.1")))
        second.connect(other.address)
        first.send("r1", [Cancel(1)])
        second.send("r1", [Cancel(2)])
        second.send("r2", [Cancel(3)])
        assert sorted(receive(replica, 2), key=str) == [("c1", Cancel(1)), ("c2", Cancel(2))]
        assert receive(other, 1) == [("c2", Cancel(3))]
        replica.send("c2", [Report(1, 2, 3, [])])
        replica.send("nobody", [Report(0, 0, 0, [])])
        other.send("c2", [Report(4, 5, 6, [])])
        assert sorted(receive(second, 2), key=str) == [("r1", Report(1, 2, 3, [])), ("r2", Report(4, 5, 6, []))]
        assert first.receive(0) == []


def test_a_message_to_an_unknown_replica_is_dropped(replica: ReplicaZmqLink) -> None:
    with connected(replica) as coordinator:
        coordinator.send("r9", [Cancel(1)])
        coordinator.disconnect("r1")
        coordinator.disconnect("r1")
        coordinator.send("r1", [Cancel(2)])
        coordinator.connect(replica.address)
        coordinator.send("r1", [Cancel(3)])
        assert receive(replica, 1) == [("c1", Cancel(3))]


def test_what_was_sent_before_a_connection_is_closed_arrives(replica: ReplicaZmqLink) -> None:
    """A Cancel is often the last that a replica is told. Here it waits for the keys to be exchanged."""
    for number in range(20):
        with connected(replica, f"c{number}") as coordinator:
            coordinator.send("r1", [Cancel(number)])
            coordinator.disconnect("r1")
    assert {message for _, message in receive(replica, 20)} == {Cancel(number) for number in range(20)}


def test_the_same_coordinator_may_come_back(replica: ReplicaZmqLink) -> None:
    """The new connection takes over the name at once, even while the old one is still open."""
    with connected(replica) as old:
        old.send("r1", [Cancel(1)])
        receive(replica, 1)
        with connected(replica) as new:
            new.send("r1", [Cancel(2)])
            assert receive(replica, 1) == [("c1", Cancel(2))]
            replica.send("c1", [Report(1, 0, 1, [])])
            assert receive(new, 1) == [("r1", Report(1, 0, 1, []))]
            assert old.receive(0) == []


def test_a_client_with_another_key_gets_nothing_through(replica: ReplicaZmqLink) -> None:
    wrong_key, _ = zmq.curve_keypair()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with (
        connected(replica) as coordinator,
        closing(ConnectingZmqLink("c2")) as stranger,
        closing(context.socket(zmq.DEALER)) as plain,
        create_connection(("127.0.0.1", int(replica.address.uri.rpartition(":")[2]))) as web,
    ):
        web.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        stranger.connect(replace(replica.address, public_key=wrong_key))
        stranger.send("r1", [Cancel(666)])
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(replica.address.uri)
        plain.send(b"\x90")
        for i in range(20):
            coordinator.send("r1", [Cancel(i)])
            assert receive(replica, 1) == [("c1", Cancel(i))]
        assert replica.receive(0.3) == []
        assert replica.malformed == 0  # nothing of it came so far


@pytest.mark.parametrize("link_of", ["replica", "coordinator"])
def test_another_thread_wakes_a_waiting_receiver(replica: ReplicaZmqLink, link_of: str) -> None:
    with connected(replica) as coordinator:
        link: Link = replica if link_of == "replica" else coordinator
        received: list[list[Envelope]] = []
        thread = threading.Thread(target=lambda: received.append(link.receive(60.0)))
        thread.start()
        link.wake()
        thread.join(timeout=20)
        assert received == [[]]
        link.wake()
        assert link.receive(60.0) == []


GARBAGE = [[b""], [b"\xff\x00garbage"], [b"\x91\x01"], [b"\x91\x81\xa4type\xa4Nope"], [b"\x90", b"\x90"], [b"[]"]]


def test_garbage_does_not_end_a_replica(replica: ReplicaZmqLink, caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    public_key, secret_key = zmq.curve_keypair()
    with connected(replica) as coordinator, closing(context.socket(zmq.DEALER)) as rude:
        rude.setsockopt(zmq.LINGER, 0)
        rude.routing_id = b"\xff\xfe"  # not UTF-8
        rude.curve_publickey, rude.curve_secretkey = public_key, secret_key
        rude.curve_serverkey = replica.address.public_key
        rude.connect(replica.address.uri)
        with caplog.at_level(logging.WARNING):
            for frames in [*GARBAGE, [b"\x90"]]:
                rude.send_multipart(frames)

            def all_logged() -> bool:
                assert replica.receive(0.05) == []
                return len(caplog.records) == len(GARBAGE) + 1

            wait_until(all_logged, "a log line for each batch")
        assert replica.malformed == len(GARBAGE) + 1
        coordinator.send("r1", [Cancel(1)])
        assert receive(replica, 1) == [("c1", Cancel(1))]


def test_garbage_does_not_end_a_coordinator(replica: ReplicaZmqLink, caplog: pytest.LogCaptureFixture) -> None:
    with connected(replica) as coordinator:
        coordinator.send("r1", [Cancel(1)])
        receive(replica, 1)
        for frames in GARBAGE:
            replica._listener.send_multipart([b"c1", *frames])
        replica.send("c1", [Report(1, 0, 1, [])])
        with caplog.at_level(logging.WARNING):
            assert receive(coordinator, 1) == [("r1", Report(1, 0, 1, []))]
        assert (len(caplog.records), coordinator.malformed) == (len(GARBAGE), len(GARBAGE))


def test_a_connection_through_which_nothing_comes_is_made_anew(
    replica: ReplicaZmqLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_link, "_HEARTBEAT_PERIOD_MS", 50)
    monkeypatch.setattr(zmq_link, "_HEARTBEAT_TIMEOUT_MS", 200)
    port = int(replica.address.uri.rpartition(":")[2])
    with Relays() as relays, closing(ConnectingZmqLink("c1")) as coordinator:
        relay = relays.open(port)
        coordinator.connect(replace(replica.address, uri=f"tcp://127.0.0.1:{relay.port}"))
        coordinator.send("r1", [Cancel(1)])
        receive(replica, 1)
        ended = coordinator._connected["r1"].get_monitor_socket(zmq.EVENT_DISCONNECTED)
        assert ended.poll(500) == 0  # what is idle, and answers, stays
        relay.set("frozen")
        assert ended.poll(20_000) == zmq.POLLIN
        coordinator._connected["r1"].disable_monitor()
        ended.close()
        relay.set("open")
        coordinator.send("r1", [Cancel(2)])
        assert receive(replica, 1) == [("c1", Cancel(2))]


def test_a_name_can_be_used_again_at_once() -> None:
    for _ in range(20):
        with closing(ReplicaZmqLink("r1", "model", "127.0.0.1")) as replica, connected(replica) as coordinator:
            coordinator.send("r1", [Cancel(1)])
            receive(replica, 1)


def test_waking_a_busy_receiver_never_blocks(replica: ReplicaZmqLink) -> None:
    """More calls than a socket queues, while the receiver is busy elsewhere."""

    def call() -> None:
        for _ in range(10_000):
            replica.wake()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert replica.receive(60.0) == []


def test_what_arrives_while_a_link_sends_is_not_overlooked(replica: ReplicaZmqLink) -> None:
    """A socket notices arrivals while it sends, and its descriptor then says nothing of them."""
    with connected(replica) as coordinator:
        coordinator.send("r1", [Cancel(0)])
        receive(replica, 1)
        for i in range(50):
            replica.send("c1", [Cancel(i)])
            time.sleep(0.001)
            for _ in range(150):  # some of them look for arrivals
                coordinator.send("r1", [Cancel(i)])
            assert receive(coordinator, 1) == [("r1", Cancel(i))]
