"""Links between processes and hosts: ZeroMQ over TCP, CURVE-encrypted, msgspec-encoded; never pickle.

Each replica binds one ROUTER, with a key pair of its own. Coordinators, drafters and leaders of ensembles connect one
DEALER to each replica that they need, and learn its public key over Ray's control plane. A peer's name ends with a
fingerprint of its public key. ZeroMQ reports the key that authenticated each batch, so no peer can use another's name.
Whoever knows a routing id can take it over, so routing ids end with secret bytes.
"""

import hashlib
import logging
import os
import secrets
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import zmq
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.thread import ThreadAuthenticator

from actors.wire.link import MAX_RECEIVED, Envelope
from actors.wire.messages import Message, ReplicaAddress

_FINGERPRINT_DIGITS = 16  # of a fingerprint: finding another key with the same one takes 2^64 tries
_NAME_END = b"\0"
_SECRET_BYTES = 16
_MAX_PEERS = 10_000
# A peer makes the other end hold at most one frame before the handshake, and _RECEIVED_BATCHES after it. More of them
# wait at the sender, which drops what exceeds _SENT_BATCHES.
_FRAME_BYTES = 2**16  # a larger batch is sent in several frames
_FRAME_OVERHEAD_BYTES = 64  # CURVE adds 33, ZMTP a few more
_RECEIVED_BATCHES = 10_000
_SENT_BATCHES = 100_000
_POLLIN = int(zmq.POLLIN)  # an int: arithmetic on ZeroMQ's enum takes longer than asking a socket
# A silent connection is opened anew, because TCP waits ever longer before it retries (measured: docs/failures.md).
# ZeroMQ's own thread answers heartbeats, however long a turn of the loop takes.
_HEARTBEAT_PERIOD_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
_CONNECT_TIMEOUT_MS = 2000
_LINGER_MS = 1000  # after closing, ZeroMQ's thread still sends what is queued for so long
_LOGGED_TYPES = 50  # of unreadable messages; peers may make up more
_TAKEN_OVER = b"\0"  # first byte of the routing id of a connection whose name a newer one took over
_log = logging.getLogger(__name__)


def name_with_key(prefix: str, public_key: bytes) -> str:
    """Return the name that belongs to a CURVE public key (Z85)."""
    return f"{prefix}-{hashlib.sha256(public_key).hexdigest()[:_FINGERPRINT_DIGITS]}"


def new_routing_id(name: str) -> bytes:
    """Return a routing id for a new connection. name: at most 238 bytes."""
    return name.encode() + _NAME_END + secrets.token_bytes(_SECRET_BYTES)


def claimed_name(routing_id: bytes) -> bytes:
    """Return the name in a routing id, without the secret bytes."""
    return routing_id.partition(_NAME_END)[0]


class PeerRoutes:
    """Routing ids of one listener's peers, by name. Beyond _MAX_PEERS the oldest are forgotten."""

    def __init__(self) -> None:
        self.routing_ids: dict[str, bytes] = {}
        self.unreachable: set[str] = set()  # known peers that had no connection at the last attempt to send

    def identify(self, routing_id: bytes, public_key: Callable[[], bytes]) -> str:
        """Return the name of a batch's sender. public_key: returns the key that authenticated a new connection.

        Raises ValueError if the name does not belong to the key.
        """
        name = claimed_name(routing_id).decode()
        if self.routing_ids.get(name) == routing_id:
            return name
        if name != name_with_key(name.rpartition("-")[0], public_key()):
            raise ValueError("the name is not that of the sender's key")
        self.routing_ids.pop(name, None)
        self.routing_ids[name] = routing_id
        if len(self.routing_ids) > _MAX_PEERS:  # a live peer comes back with its next message
            oldest = next(iter(self.routing_ids))
            del self.routing_ids[oldest]
            self.unreachable.discard(oldest)
        return name


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])
_raw_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def _prepare(socket: zmq.Socket[bytes]) -> None:
    """Set the options that both ends share. Call before bind and connect."""
    socket.maxmsgsize = _FRAME_BYTES + _FRAME_OVERHEAD_BYTES
    socket.sndhwm, socket.rcvhwm = _SENT_BATCHES, _RECEIVED_BATCHES
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_PERIOD_MS, _HEARTBEAT_TIMEOUT_MS


def _frames(messages: Sequence[Message]) -> list[bytes]:
    body = _encoder.encode(messages)
    return [body[start : start + _FRAME_BYTES] for start in range(0, len(body), _FRAME_BYTES)]


class _Tag(msgspec.Struct):
    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tag)


def _public_key(frame: zmq.Frame) -> bytes:
    """Return the CURVE key (Z85) that authenticated a frame's sender; b"" if none."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return int(socket.get(zmq.EVENTS)) & _POLLIN != 0


class _Wakeup:
    """An event descriptor by which any thread interrupts a wait."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            self._open = False
            os.close(self.fd)


class _Sockets:
    """Polls many sockets at a cost that grows only with those that are readable.

    A ZeroMQ socket's descriptor signals new events only until the socket has processed them, which it also does while
    sending. So sockets that were used since the last poll are asked directly (zmq_getsockopt(3), ZMQ_FD).
    """

    def __init__(self, wakeup: _Wakeup) -> None:
        self._wakeup = wakeup
        self._epoll = select.epoll()
        self._epoll.register(wakeup.fd, select.EPOLLIN)
        self._by_fd: dict[int, zmq.Socket[bytes]] = {}
        self._used: set[zmq.Socket[bytes]] = set()

    def add(self, socket: zmq.Socket[bytes]) -> None:
        self._by_fd[socket.FD] = socket
        self._epoll.register(socket.FD, select.EPOLLIN)
        self._used.add(socket)

    def discard(self, socket: zmq.Socket[bytes]) -> None:
        self._epoll.unregister(socket.FD)
        self._used.discard(self._by_fd.pop(socket.FD))

    def send(self, socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        """Send without waiting. Drop the batch if the peer is gone or stuck: its silence will be noticed."""
        self._used.add(socket)
        with suppress(zmq.Again):
            socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> Iterator[tuple[zmq.Socket[bytes], list[zmq.Frame]]]:
        """Yield batches that have arrived, at most MAX_RECEIVED per socket. Wait up to `timeout_s` for the first."""
        ready = [socket for socket in self._used if _readable(socket)]
        self._used.clear()
        for fd, _ in self._epoll.poll(0.0 if ready else timeout_s):
            if fd == self._wakeup.fd:
                self._wakeup.clear()
            elif self._by_fd[fd] not in ready:
                ready.append(self._by_fd[fd])
        for socket in ready:
            for _ in range(MAX_RECEIVED):
                if not _readable(socket):
                    break
                yield socket, socket.recv_multipart(zmq.NOBLOCK, copy=False)
            else:
                self._used.add(socket)

    def close(self) -> None:
        for socket in list(self._by_fd.values()):
            self.discard(socket)
            socket.close(_LINGER_MS)
        self._epoll.close()


class ConnectingZmqLink:
    """A coordinator's link: one connection per replica, opened and closed as replicas come and go."""

    def __init__(self, prefix: str) -> None:
        """prefix: the readable part of the link's name. A fingerprint of its key follows."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._public_key, self._secret_key = zmq.curve_keypair()
        self.name = name_with_key(prefix, self._public_key)
        self._wakeup = _Wakeup()
        self._sockets = _Sockets(self._wakeup)
        self._connected: dict[str, zmq.Socket[bytes]] = {}
        self._peers: dict[zmq.Socket[bytes], str] = {}
        self.malformed = 0
        self._unreadable_types: set[str] = set()  # of messages that were dropped

    def connect(self, address: ReplicaAddress) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.routing_id = new_routing_id(self.name)
        socket.curve_publickey, socket.curve_secretkey = self._public_key, self._secret_key
        socket.curve_serverkey = address.public_key
        socket.connect_timeout = _CONNECT_TIMEOUT_MS
        _prepare(socket)
        socket.connect(address.uri)
        self._connected[address.name] = socket
        self._peers[socket] = address.name
        self._sockets.add(socket)
        self.send(address.name, [])  # a replica can send only to peers that have sent to it

    def disconnect(self, peer: str) -> None:
        socket = self._connected.pop(peer, None)
        if socket is not None:
            del self._peers[socket]
            self._sockets.discard(socket)
            socket.close(_LINGER_MS)

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        socket = self._connected.get(peer)
        if socket is not None:
            self._sockets.send(socket, _frames(messages))

    def reaches(self, peer: str) -> bool:
        return True  # connections are made anew without end

    def receive(self, timeout_s: float) -> list[Envelope]:
        envelopes: list[Envelope] = []
        for socket, frames in self._sockets.receive(timeout_s):
            try:
                envelopes += self._read(socket, frames)
            except (ValueError, RecursionError) as error:  # no peer may end a loop
                size = sum(map(len, frames))
                _log.warning("dropped a batch of %d bytes from %s: %s", size, self._describe(socket, frames), error)
                self.malformed += 1
        return envelopes

    def _read(self, socket: zmq.Socket[bytes], frames: Sequence[zmq.Frame]) -> list[Envelope]:
        """Decode a batch; raises ValueError or RecursionError if it is malformed."""
        return self._decode(self._peers[socket], frames)

    def _decode(self, sender: str, frames: Sequence[zmq.Frame]) -> list[Envelope]:
        """Decode a batch. Drop messages that only another version understands."""
        body = frames[0].buffer if len(frames) == 1 else b"".join(frame.buffer for frame in frames)
        try:
            return [(sender, message) for message in _decoder.decode(body)]
        except msgspec.ValidationError:
            messages = [self._decode_message(sender, raw) for raw in _raw_decoder.decode(body)]
            return [(sender, message) for message in messages if message is not None]

    def _decode_message(self, sender: str, raw: msgspec.Raw) -> Message | None:
        """Decode a message. If that is impossible, count it, and log the first of its type."""
        kind = _tag_decoder.decode(raw).type
        try:
            return _message_decoder.decode(raw)
        except msgspec.ValidationError as error:
            self.malformed += 1
            if kind not in self._unreadable_types and len(self._unreadable_types) < _LOGGED_TYPES:
                self._unreadable_types.add(kind)
                _log.warning("dropped a %.50s from %s, and will drop others: %s", kind, sender, error)
            return None

    def _describe(self, socket: zmq.Socket[bytes], frames: Sequence[zmq.Frame]) -> str:
        return self._peers[socket]

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        self._sockets.close()
        self._wakeup.close()
        self._context.destroy(0)


class ReplicaZmqLink(ConnectingZmqLink):
    """A replica's link. It also listens on `host` at a free port; its peers are those that have sent to it."""

    def __init__(self, model: str, host: str) -> None:
        super().__init__(model)
        self._routes = PeerRoutes()
        self._authenticator = ThreadAuthenticator(self._context)  # admits every peer that has the listener's key, ...
        self._authenticator.start()
        self._authenticator.configure_curve(location=CURVE_ALLOW_ANY)  # ... and reports each peer's own
        public_key, secret_key = zmq.curve_keypair()
        self._listener = self._context.socket(zmq.ROUTER)
        self._listener.curve_server = True
        self._listener.curve_secretkey = secret_key
        _prepare(self._listener)
        self._listener.router_handover = True
        self._listener.router_mandatory = True  # an error where there is no connection to the peer
        port = self._listener.bind_to_random_port(f"tcp://{host}")
        self.address = ReplicaAddress(self.name, model, f"tcp://{host}:{port}", public_key)
        self._sockets.add(self._listener)

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        routing_id = self._routes.routing_ids.get(peer)
        if peer in self._connected:
            super().send(peer, messages)
        elif routing_id is not None:
            try:
                self._sockets.send(self._listener, [routing_id, *_frames(messages)])
                self._routes.unreachable.discard(peer)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._routes.unreachable.add(peer)

    def reaches(self, peer: str) -> bool:
        return peer not in self._routes.unreachable

    def _read(self, socket: zmq.Socket[bytes], frames: Sequence[zmq.Frame]) -> list[Envelope]:
        if socket is not self._listener:
            return super()._read(socket, frames)
        routing_id, *body = frames
        if routing_id.bytes.startswith(_TAKEN_OVER):
            return []  # sent before the newer connection; what matters is sent again
        sender = self._routes.identify(routing_id.bytes, partial(_public_key, body[0]))
        return self._decode(sender, body)

    def _describe(self, socket: zmq.Socket[bytes], frames: Sequence[zmq.Frame]) -> str:
        if socket is not self._listener:
            return super()._describe(socket, frames)
        return repr(claimed_name(frames[0].bytes))

    def close(self) -> None:
        self._authenticator.stop()
        super().close()
