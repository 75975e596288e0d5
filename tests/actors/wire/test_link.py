"""Local links behave as links must, and an outbox sends each peer one batch."""

import threading

from actors.wire.link import Envelope, LocalExchange, Outbox
from actors.wire.messages import Cancel


def test_messages_arrive_in_order_with_their_sender() -> None:
    exchange = LocalExchange()
    first, second, third = (exchange.join(name) for name in ("a", "b", "c"))
    first.send("c", [Cancel(1), Cancel(2)])
    second.send("c", [Cancel(3)])
    first.send("nobody", [Cancel(4)])
    assert third.receive(1.0) == [("a", Cancel(1)), ("a", Cancel(2)), ("b", Cancel(3))]
    assert third.receive(0) == third.receive(0.01) == []


def test_messages_to_a_closed_link_are_dropped() -> None:
    exchange = LocalExchange()
    sender, closed = exchange.join("a"), exchange.join("b")
    closed.close()
    sender.send("b", [Cancel(1)])
    assert closed.receive(0) == []


def test_another_thread_wakes_a_waiting_receiver() -> None:
    link = LocalExchange().join("a")
    received: list[list[Envelope]] = []
    thread = threading.Thread(target=lambda: received.append(link.receive(60.0)))
    thread.start()
    link.wake()
    thread.join(timeout=20)
    assert received == [[]]


def test_the_outbox_sends_each_peer_one_batch() -> None:
    exchange = LocalExchange()
    sender, first, second = (exchange.join(name) for name in ("a", "b", "c"))
    outbox = Outbox(sender)
    for i, peer in enumerate("bcb"):
        outbox.put(peer, Cancel(i))
    assert first.receive(0) == []
    outbox.flush()
    outbox.flush()
    assert first.receive(0) == [("a", Cancel(0)), ("a", Cancel(2))]
    assert second.receive(0) == [("a", Cancel(1))]
