"""Links between processes and hosts: ZeroMQ over TCP, CURVE-encrypted, msgspec-encoded; never pickle.

Each replica binds one ROUTER; each coordinator, and each leader of an ensemble, connects one DEALER per replica. A
replica makes its CURVE key pair at start; its public key, handed out over Ray's control plane, is what lets peers in.
"""

import logging
import math
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import zmq

from actors.addresses import ReplicaAddress
from actors.link import MAX_RECEIVED, Envelope
from actors.messages import Message

_QUEUED_BATCHES = 100_000  # per peer; a peer that lags further behind loses messages
_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


def _decode(frames: Sequence[bytes]) -> list[Envelope]:
    """A batch, as sender and body; one that makes no sense is dropped, so that no peer can end a loop."""
    try:
        sender, body = frames
        peer = sender.decode()
        return [(peer, message) for message in _decoder.decode(body)]
    except (ValueError, msgspec.DecodeError) as error:
        _log.warning("dropped a batch of %d bytes from %r: %s", sum(map(len, frames)), frames[0], error)
        return []


class _Wakeup:
    """A self-addressed socket pair with which any thread interrupts a poll."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        address = f"inproc://wake-{secrets.token_hex(8)}"  # not a name: ZeroMQ frees addresses late
        self.receiver = context.socket(zmq.PULL)
        self.receiver.bind(address)
        self._sender = context.socket(zmq.PUSH)
        self._sender.connect(address)
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:
            if not self._sender.closed:
                with suppress(zmq.Again):  # then the queue is full of wake-up calls, and one is enough
                    self._sender.send(b"", zmq.NOBLOCK)

    def clear(self) -> None:
        while self.receiver.poll(0):
            self.receiver.recv()

    def close(self) -> None:
        with self._lock:
            self._sender.close(0)
        self.receiver.close(0)


class ConnectingZmqLink:
    """One connection per replica, opened and closed as replicas come and go: a coordinator's end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._wakeup = _Wakeup(self._context)
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup.receiver, zmq.POLLIN)

    def connect(self, address: ReplicaAddress) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.routing_id = self.name.encode()
        socket.curve_publickey, socket.curve_secretkey = self._public_key, self._secret_key
        socket.curve_serverkey = address.public_key
        socket.set_hwm(_QUEUED_BATCHES)
        socket.connect(address.uri)
        self._sockets[address.name] = socket
        self._poller.register(socket, zmq.POLLIN)

    def disconnect(self, peer: str) -> None:
        socket = self._sockets.pop(peer, None)
        if socket is not None:
            self._poller.unregister(socket)
            socket.close(0)

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        socket = self._sockets.get(peer)
        if socket is None:
            return
        try:
            socket.send(_encoder.encode(messages), zmq.NOBLOCK)
        except zmq.Again:
            return  # the replica is gone or stuck; its silence will be noticed

    def receive(self, timeout_s: float) -> list[Envelope]:
        ready = {socket for socket, _ in self._poller.poll(math.ceil(timeout_s * 1e3))}
        self._wakeup.clear()
        envelopes: list[Envelope] = []
        for peer, socket in list(self._sockets.items()):
            for _ in range(MAX_RECEIVED if socket in ready else 0):
                if not socket.poll(0):
                    break
                envelopes += _decode([peer.encode(), *socket.recv_multipart()])
        return envelopes

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        for peer in list(self._sockets):
            self.disconnect(peer)
        self._wakeup.close()


class ReplicaZmqLink(ConnectingZmqLink):
    """A replica's end: it listens, too, on `host` at a free port; peers are those that wrote to it."""

    def __init__(self, name: str, model: str, host: str) -> None:
        super().__init__(name)
        public_key, secret_key = zmq.curve_keypair()
        self._listener = self._context.socket(zmq.ROUTER)
        self._listener.curve_server = True
        self._listener.curve_secretkey = secret_key
        self._listener.set_hwm(_QUEUED_BATCHES)
        self._listener.router_handover = True
        port = self._listener.bind_to_random_port(f"tcp://{host}")
        self.address = ReplicaAddress(name, model, f"tcp://{host}:{port}", public_key)
        self._poller.register(self._listener, zmq.POLLIN)

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        if peer in self._sockets:
            super().send(peer, messages)
            return
        with suppress(zmq.Again):  # the peer stopped reading long ago; it will be re-admitted elsewhere
            self._listener.send_multipart([peer.encode(), _encoder.encode(messages)], zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> list[Envelope]:
        envelopes = super().receive(timeout_s)
        for _ in range(MAX_RECEIVED):
            if not self._listener.poll(0):
                break
            envelopes += _decode(self._listener.recv_multipart())
        return envelopes

    def close(self) -> None:
        super().close()
        self._listener.close(0)
