"""ZeroMQ links over real sockets on the loopback interface."""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from actors.wire import zmq_link
from actors.wire.link import Envelope, Link
from actors.wire.messages import Admit, Cancel, Heartbeat, LogitsReply, Message, Offer, PackedLogits, Report
from actors.wire.zmq_link import ConnectingZmqLink, PeerRoutes, ReplicaZmqLink, name_with_key, new_routing_id
from decoding.sampling.params import SamplingParams
from tests.chaos.proxy import Relays
from tests.support.waiting import wait_until


@pytest.fixture
def replica() -> Iterator[ReplicaZmqLink]:
    with closing(ReplicaZmqLink("model", "127.0.0.1")) as link:
        yield link


@contextmanager
def connected(replica: ReplicaZmqLink) -> Iterator[ConnectingZmqLink]:
    with closing(ConnectingZmqLink("coordinator")) as link:
        link.connect(replica.address)
        yield link


def receive(link: Link, count: int) -> list[Envelope]:
    """Receive exactly `count` messages, in any batches."""
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
        coordinator.send(replica.name, [admit])
        for offer in offers(300):
            coordinator.send(replica.name, [offer])
        name = coordinator.name
        assert receive(replica, 301) == [(name, admit), *((name, offer) for offer in offers(300))]
        replica.send(name, offers(300))
        assert receive(coordinator, 300) == [(replica.name, offer) for offer in offers(300)]


def test_a_replica_knows_that_a_coordinator_is_gone_once_it_sends_to_it(replica: ReplicaZmqLink) -> None:
    with connected(replica) as there, connected(replica) as gone:
        for link in (there, gone):
            link.send(replica.name, [Cancel(1)])
        receive(replica, 2)
        replica.send(gone.name, [Report(0, 0, 1, [])])
        assert replica.reaches(gone.name)
        gone.disconnect(replica.name)

        def noticed() -> bool:
            for link in (there, gone):
                replica.send(link.name, [Report(0, 0, 1, [])])
            return not replica.reaches(gone.name)

        wait_until(noticed, "the connection's end")
        assert replica.reaches(there.name)
        gone.connect(replica.address)
        gone.send(replica.name, [Cancel(2)])
        receive(replica, 1)
        replica.send(gone.name, [Report(0, 0, 1, [])])
        assert replica.reaches(gone.name)


def test_each_peer_gets_its_own_messages(replica: ReplicaZmqLink) -> None:
    with connected(replica) as first, connected(replica) as second, ExitStack() as stack:
        other = stack.enter_context(closing(ReplicaZmqLink("model", "127.0.0.1")))
        second.connect(other.address)
        first.send(replica.name, [Cancel(1)])
        second.send(replica.name, [Cancel(2)])
        second.send(other.name, [Cancel(3)])
        expected = [(first.name, Cancel(1)), (second.name, Cancel(2))]
        assert sorted(receive(replica, 2), key=str) == sorted(expected, key=str)
        assert receive(other, 1) == [(second.name, Cancel(3))]
        replica.send(second.name, [Report(1, 2, 3, [])])
        replica.send("nobody", [Report(0, 0, 0, [])])
        other.send(second.name, [Report(4, 5, 6, [])])
        reports = [(replica.name, Report(1, 2, 3, [])), (other.name, Report(4, 5, 6, []))]
        assert sorted(receive(second, 2), key=str) == sorted(reports, key=str)
        assert first.receive(0) == []


def test_a_message_to_an_unknown_replica_is_dropped(replica: ReplicaZmqLink) -> None:
    with connected(replica) as coordinator:
        coordinator.send("r9", [Cancel(1)])
        coordinator.disconnect(replica.name)
        coordinator.disconnect(replica.name)
        coordinator.send(replica.name, [Cancel(2)])
        coordinator.connect(replica.address)
        coordinator.send(replica.name, [Cancel(3)])
        assert receive(replica, 1) == [(coordinator.name, Cancel(3))]


def test_what_was_sent_before_a_connection_is_closed_arrives(replica: ReplicaZmqLink) -> None:
    """A Cancel is often the last message to a replica. Here it waits for the handshake."""
    for number in range(20):
        with connected(replica) as coordinator:
            coordinator.send(replica.name, [Cancel(number)])
            coordinator.disconnect(replica.name)
    assert {message for _, message in receive(replica, 20)} == {Cancel(number) for number in range(20)}


def test_a_coordinator_that_reconnects_gets_messages_over_the_new_connection(replica: ReplicaZmqLink) -> None:
    with connected(replica) as coordinator:
        coordinator.send(replica.name, [Cancel(1)])
        receive(replica, 1)
        old = coordinator._connected[replica.name]  # stays open
        coordinator.connect(replica.address)
        coordinator.send(replica.name, [Cancel(2)])
        assert receive(replica, 1) == [(coordinator.name, Cancel(2))]
        replica.send(coordinator.name, [Report(1, 0, 1, [])])
        wait_until(lambda: coordinator._connected[replica.name].poll(10) > 0, "the report")
        assert old.poll(0) == 0
        assert receive(coordinator, 1) == [(replica.name, Report(1, 0, 1, []))]


def test_a_replica_can_send_to_a_peer_that_has_only_connected(replica: ReplicaZmqLink) -> None:
    with connected(replica) as drafter:

        def gets_report() -> bool:
            assert replica.receive(0.01) == []
            replica.send(drafter.name, [Report(1, 0, 1, [])])
            return bool(drafter.receive(0.05))

        wait_until(gets_report, "a report")


@contextmanager
def keyed(replica: ReplicaZmqLink, routing_id: bytes) -> Iterator[zmq.Socket[bytes]]:
    """Connect a stranger that has the replica's public key and its own key pair."""
    public_key, secret_key = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.routing_id = routing_id
        socket.curve_publickey, socket.curve_secretkey = public_key, secret_key
        socket.curve_serverkey = replica.address.public_key
        socket.connect(replica.address.uri)
        yield socket


def test_no_peer_can_take_over_another_peers_name(replica: ReplicaZmqLink, caplog: pytest.LogCaptureFixture) -> None:
    with connected(replica) as coordinator:
        coordinator.send(replica.name, [Cancel(1)])
        receive(replica, 1)
        name = coordinator.name.encode()
        for routing_id in (name, name + b"\0", new_routing_id(coordinator.name)):
            with keyed(replica, routing_id) as thief, caplog.at_level(logging.WARNING):
                caplog.clear()
                thief.send(b"\x91\x82\xa4type\xa6Cancel\xaarequest_id\x01")

                def was_refused() -> bool:
                    assert replica.receive(0.05) == []
                    return len(caplog.records) == 1

                wait_until(was_refused, "a log line")
                assert caplog.messages[0].endswith(f"{name!r}: the name is not that of the sender's key")
                replica.send(coordinator.name, [Report(1, 0, 1, [])])
                assert receive(coordinator, 1) == [(replica.name, Report(1, 0, 1, []))]
                assert thief.poll(100) == 0


def dial(replica: ReplicaZmqLink) -> socket.socket:
    """Open a connection up to the CURVE handshake, without the handshake."""
    peer = socket.create_connection(("127.0.0.1", int(replica.address.uri.rpartition(":")[2])))
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
    assert len(peer.recv(64, socket.MSG_WAITALL)) == 64
    return peer


def test_a_peer_without_a_key_is_cut_off_at_once(replica: ReplicaZmqLink) -> None:
    with dial(replica) as peer:
        peer.settimeout(20)
        peer.sendall(b"\x06" + struct.pack(">Q", 2**17))  # the length of a command that is to follow
        assert peer.recv(1) == b""


def test_a_peer_with_the_key_is_cut_off_when_it_sends_too_much_at_once(replica: ReplicaZmqLink) -> None:
    with connected(replica) as coordinator, keyed(replica, b"rude") as rude:
        ended = rude.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        rude.send(bytes(2**17))
        assert ended.poll(20_000) == zmq.POLLIN
        rude.disable_monitor()
        ended.close()
        coordinator.send(replica.name, [Cancel(1)])
        assert receive(replica, 1) == [(coordinator.name, Cancel(1))]


@pytest.mark.parametrize("size", [2**16 - 100, 2**16, 2**16 + 1, 5 * 2**16, 33 * 262_144 * 4])
def test_large_batches_arrive_both_ways(replica: ReplicaZmqLink, size: int) -> None:
    """The largest batch holds the logits of 33 positions over a vocabulary of 262 144."""
    values = os.urandom(1 << 16) * (size >> 16) + bytes(size & 0xFFFF)
    answer = LogitsReply(1, 1, PackedLogits(1, size // 4, "float32", values), [])
    with connected(replica) as leader:
        leader.send(replica.name, [answer, Cancel(1)])
        assert receive(replica, 2) == [(leader.name, answer), (leader.name, Cancel(1))]
        replica.send(leader.name, [answer, Cancel(1)])
        assert receive(leader, 2) == [(replica.name, answer), (replica.name, Cancel(1))]


def test_a_client_with_another_key_gets_nothing_through(replica: ReplicaZmqLink) -> None:
    wrong_key, _ = zmq.curve_keypair()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with (
        connected(replica) as coordinator,
        closing(ConnectingZmqLink("coordinator")) as stranger,
        closing(context.socket(zmq.DEALER)) as plain,
        socket.create_connection(("127.0.0.1", int(replica.address.uri.rpartition(":")[2]))) as web,
    ):
        web.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        stranger.connect(replace(replica.address, public_key=wrong_key))
        stranger.send(replica.name, [Cancel(666)])
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(replica.address.uri)
        plain.send(b"\x90")
        for i in range(20):
            coordinator.send(replica.name, [Cancel(i)])
            assert receive(replica, 1) == [(coordinator.name, Cancel(i))]
        assert replica.receive(0.3) == []
        assert replica.malformed == 0  # none of it reached the decoder


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


GARBAGE = [
    [b""],
    [b"\xff\x00garbage"],
    [b"\x91\x01"],
    [b"\x91\x81\xa4type\xa4Nope"],
    [b"\x90", b"\x90"],
    [b"[]"],
    [b"\xdd\xff\xff\xff\xff"],  # announces four billion messages
    [b"\x91\x82\xa4type\xa9Heartbeat\xa1x\xc6\xff\xff\xff\xff"],  # announces four billion bytes
    [b"\x91\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 60_000],  # nested deeper than Python recurses
]


def test_garbage_does_not_end_a_replica(replica: ReplicaZmqLink, caplog: pytest.LogCaptureFixture) -> None:
    with connected(replica) as coordinator, connected(replica) as rude, keyed(replica, b"\xff\xfe") as nameless:
        with caplog.at_level(logging.WARNING):
            for frames in GARBAGE:
                rude._connected[replica.name].send_multipart(frames)
            nameless.send(b"\x90")  # from a name that is not UTF-8

            def all_logged() -> bool:
                assert replica.receive(0.05) == []
                return len(caplog.records) == len(GARBAGE) + 1

            wait_until(all_logged, "a log line for each batch")
        assert replica.malformed == len(GARBAGE) + 1
        coordinator.send(replica.name, [Cancel(1)])
        assert receive(replica, 1) == [(coordinator.name, Cancel(1))]


def test_garbage_does_not_end_a_coordinator(replica: ReplicaZmqLink, caplog: pytest.LogCaptureFixture) -> None:
    with connected(replica) as coordinator:
        coordinator.send(replica.name, [Cancel(1)])
        receive(replica, 1)
        routing_id = coordinator._connected[replica.name].get(zmq.ROUTING_ID)
        assert isinstance(routing_id, bytes)
        for frames in GARBAGE:
            replica._listener.send_multipart([routing_id, *frames])
        replica.send(coordinator.name, [Report(1, 0, 1, [])])
        with caplog.at_level(logging.WARNING):
            assert receive(coordinator, 1) == [(replica.name, Report(1, 0, 1, []))]
        assert (len(caplog.records), coordinator.malformed) == (len(GARBAGE), len(GARBAGE))


class Pause(msgspec.Struct, frozen=True, tag=True):
    """A message that a newer version has."""

    request_id: int


class Renamed(msgspec.Struct, frozen=True, tag="Cancel"):
    """A message whose field another version calls otherwise."""

    id: int


class Extended(msgspec.Struct, frozen=True, tag="Cancel"):
    """A message to which a newer version adds a field."""

    request_id: int
    reason: str = "hung up"


def test_a_message_of_another_version_is_dropped_alone(
    replica: ReplicaZmqLink, caplog: pytest.LogCaptureFixture
) -> None:
    """During a rolling update others' messages are in the same batches."""
    batch = msgspec.msgpack.encode([Heartbeat(), Cancel(1), Pause(2), Renamed(3), Extended(4), Pause(5), Cancel(6)])
    with connected(replica) as coordinator, caplog.at_level(logging.WARNING):
        for _ in range(2):
            coordinator._connected[replica.name].send(batch)
        received = receive(replica, 2 * 4)
        assert received == 2 * [(coordinator.name, each) for each in (Heartbeat(), Cancel(1), Cancel(4), Cancel(6))]
    assert replica.malformed == 2 * 3
    assert [record.getMessage().split(" from ")[0] for record in caplog.records] == [
        "dropped a Pause",
        "dropped a Cancel",
    ]


def test_a_peer_that_makes_up_types_does_not_fill_the_log(
    replica: ReplicaZmqLink, caplog: pytest.LogCaptureFixture
) -> None:
    count = 3 * zmq_link._LOGGED_TYPES
    batch = msgspec.msgpack.encode([*({"type": str(number)} for number in range(count)), Heartbeat()])
    with connected(replica) as rude, caplog.at_level(logging.WARNING):
        rude._connected[replica.name].send(batch)
        receive(replica, 1)
    assert (replica.malformed, len(caplog.records)) == (count, zmq_link._LOGGED_TYPES)


def test_a_silent_connection_is_opened_anew(replica: ReplicaZmqLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_link, "_HEARTBEAT_PERIOD_MS", 50)
    monkeypatch.setattr(zmq_link, "_HEARTBEAT_TIMEOUT_MS", 200)
    port = int(replica.address.uri.rpartition(":")[2])
    with Relays() as relays, closing(ConnectingZmqLink("coordinator")) as coordinator:
        relay = relays.open(port)
        coordinator.connect(replace(replica.address, uri=f"tcp://127.0.0.1:{relay.port}"))
        coordinator.send(replica.name, [Cancel(1)])
        receive(replica, 1)
        ended = coordinator._connected[replica.name].get_monitor_socket(zmq.EVENT_DISCONNECTED)
        assert ended.poll(500) == 0  # an idle connection that answers stays
        relay.set("frozen")
        assert ended.poll(20_000) == zmq.POLLIN
        coordinator._connected[replica.name].disable_monitor()
        ended.close()
        relay.set("open")
        coordinator.send(replica.name, [Cancel(2)])
        assert receive(replica, 1) == [(coordinator.name, Cancel(2))]


def test_a_name_can_be_used_again_at_once() -> None:
    for _ in range(20):
        with closing(ReplicaZmqLink("model", "127.0.0.1")) as replica, connected(replica) as coordinator:
            coordinator.send(replica.name, [Cancel(1)])
            receive(replica, 1)


def test_waking_a_busy_receiver_never_blocks(replica: ReplicaZmqLink) -> None:
    """Here it is woken more often than a socket could queue."""

    def call() -> None:
        for _ in range(10_000):
            replica.wake()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert replica.receive(60.0) == []


def test_what_arrives_while_a_link_sends_is_not_overlooked(replica: ReplicaZmqLink) -> None:
    """A socket processes arrivals while it sends. Its descriptor then does not signal them."""
    with connected(replica) as coordinator:
        coordinator.send(replica.name, [Cancel(0)])
        receive(replica, 1)
        for i in range(50):
            replica.send(coordinator.name, [Cancel(i)])
            time.sleep(0.001)
            for _ in range(150):  # some of these calls process arrivals
                coordinator.send(replica.name, [Cancel(i)])
            assert receive(coordinator, 1) == [(replica.name, Cancel(i))]


def test_peers_that_are_gone_are_forgotten_with_their_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_link, "_MAX_PEERS", 3)
    routes, names = PeerRoutes(), list[str]()
    for _ in range(10):
        key, _ = zmq.curve_keypair()
        names.append(routes.identify(new_routing_id(name_with_key("drafter", key)), partial(bytes, key)))
        routes.unreachable.add(names[-1])
    assert list(routes.routing_ids) == names[-3:]
    assert routes.unreachable == set(names[-3:])
