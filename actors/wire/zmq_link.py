"""Links between processes and hosts: ZeroMQ over TCP, CURVE-encrypted, msgspec-encoded; never pickle.

Each replica binds one ROUTER; coordinators, drafters and leaders of ensembles connect one DEALER to each that they
need. A replica makes a CURVE key pair for its listener at start; the public key, handed out over Ray's control plane,
is what lets peers in. Each peer has a key pair of its own, and its name is bound to that (`peer_names.py`).
"""

import logging
import os
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import zmq
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.thread import ThreadAuthenticator

from actors.wire.addresses import ReplicaAddress
from actors.wire.link import MAX_RECEIVED, Envelope
from actors.wire.messages import Message
from actors.wire.peer_names import PeerRoutes, claimed_name, name_with_key, new_routing_id

# What a peer may make the other end hold: before the handshake one frame, after it this many batches. Beyond, they wait
# at the sender, which drops them once it has as many as it may.
_FRAME_BYTES = 2**16  # a batch that is larger goes in several frames
_FRAME_OVERHEAD_BYTES = 64  # of CURVE: 33, and of ZMTP
_RECEIVED_BATCHES = 10_000
_SENT_BATCHES = 100_000
_POLLIN = int(zmq.POLLIN)  # as a plain number: arithmetic on ZeroMQ's own takes longer than to ask a socket
# A connection through which nothing comes is made anew, for TCP would wait ever longer before it tries again (measured:
# docs/failures.md). ZeroMQ's own thread answers, however long a turn of the loop takes.
_HEARTBEAT_PERIOD_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
_CONNECT_TIMEOUT_MS = 2000
_LINGER_MS = 1000  # how long what was sent may still leave, in ZeroMQ's thread, once a connection is closed
_TAKEN_OVER = b"\0"  # begins what ZeroMQ calls a connection once a newer one has its name
_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


def _prepare(socket: zmq.Socket[bytes]) -> None:
    """What both ends of a connection have in common. To be set before bind and connect."""
    socket.maxmsgsize = _FRAME_BYTES + _FRAME_OVERHEAD_BYTES
    socket.sndhwm, socket.rcvhwm = _SENT_BATCHES, _RECEIVED_BATCHES
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_PERIOD_MS, _HEARTBEAT_TIMEOUT_MS


def _frames(messages: Sequence[Message]) -> list[bytes]:
    """Encode a batch, in frames that no receiver refuses."""
    body = _encoder.encode(messages)
    return [body[start : start + _FRAME_BYTES] for start in range(0, len(body), _FRAME_BYTES)]


def _messages(frames: Sequence[zmq.Frame]) -> list[Message]:
    """Decode a batch; raises ValueError or RecursionError if it makes no sense."""
    return _decoder.decode(frames[0].buffer if len(frames) == 1 else b"".join(frame.buffer for frame in frames))


def _public_key(frame: zmq.Frame) -> bytes:
    """Return the CURVE key that the sender of a frame has proved to own, Z85; b"" for none."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return int(socket.get(zmq.EVENTS)) & _POLLIN != 0


class _Wakeup:
    """A descriptor with which any thread interrupts a wait."""

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
    """Finds out which of many sockets have something to read, at the cost of those that have, not of all.

    The descriptor that stands for a ZeroMQ socket is readable when something new has happened to the socket, and no
    longer once the socket has noticed, be it while sending. So a socket that was used is asked itself the next time
    (zmq_getsockopt(3), ZMQ_FD).
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
        """Without waiting; to a peer that is gone or stuck, nothing: its silence will be noticed."""
        self._used.add(socket)
        with suppress(zmq.Again):
            socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> Iterator[tuple[zmq.Socket[bytes], list[zmq.Frame]]]:
        """Batches that have arrived, at most MAX_RECEIVED of each socket; waits for the first."""
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
    """One connection per replica, opened and closed as replicas come and go: a coordinator's end."""

    def __init__(self, prefix: str) -> None:
        """prefix: the readable part of its name, which ends with a fingerprint of the key."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._public_key, self._secret_key = zmq.curve_keypair()
        self.name = name_with_key(prefix, self._public_key)
        self._wakeup = _Wakeup()
        self._sockets = _Sockets(self._wakeup)
        self._connected: dict[str, zmq.Socket[bytes]] = {}
        self._peers: dict[zmq.Socket[bytes], str] = {}
        self.malformed = 0

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
        self.send(address.name, [])  # the replica can answer to nobody that it has not heard of

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

    def receive(self, timeout_s: float) -> list[Envelope]:
        envelopes: list[Envelope] = []
        for socket, frames in self._sockets.receive(timeout_s):
            try:
                envelopes += self._read(socket, frames)
            except (ValueError, RecursionError) as error:  # so that no peer can end a loop
                size = sum(map(len, frames))
                _log.warning("dropped a batch of %d bytes from %s: %s", size, self._describe(socket, frames), error)
                self.malformed += 1
        return envelopes

    def _read(self, socket: zmq.Socket[bytes], frames: Sequence[zmq.Frame]) -> list[Envelope]:
        """The messages of a batch; raises ValueError or RecursionError if it makes no sense."""
        return [(self._peers[socket], message) for message in _messages(frames)]

    def _describe(self, socket: zmq.Socket[bytes], frames: Sequence[zmq.Frame]) -> str:
        """The sender of a batch that makes no sense, for the log."""
        return self._peers[socket]

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        self._sockets.close()
        self._wakeup.close()
        self._context.destroy(0)


class ReplicaZmqLink(ConnectingZmqLink):
    """A replica's end: it listens, too, on `host` at a free port; peers are those that wrote to it."""

    def __init__(self, model: str, host: str) -> None:
        super().__init__(model)
        self._routes = PeerRoutes()
        self._authenticator = ThreadAuthenticator(self._context)  # lets in whoever has the listener's key, ...
        self._authenticator.start()
        self._authenticator.configure_curve(location=CURVE_ALLOW_ANY)  # ... and tells us each peer's own
        public_key, secret_key = zmq.curve_keypair()
        self._listener = self._context.socket(zmq.ROUTER)
        self._listener.curve_server = True
        self._listener.curve_secretkey = secret_key
        _prepare(self._listener)
        self._listener.router_handover = True
        port = self._listener.bind_to_random_port(f"tcp://{host}")
        self.address = ReplicaAddress(self.name, model, f"tcp://{host}:{port}", public_key)
        self._sockets.add(self._listener)

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        routing_id = self._routes.get(peer)
        if peer in self._connected:
            super().send(peer, messages)
        elif routing_id is not None:
            self._sockets.send(self._listener, [routing_id, *_frames(messages)])

    def _read(self, socket: zmq.Socket[bytes], frames: Sequence[zmq.Frame]) -> list[Envelope]:
        if socket is not self._listener:
            return super()._read(socket, frames)
        routing_id, *body = frames
        if routing_id.bytes.startswith(_TAKEN_OVER):  # what it brings was sent before, and is told again if it matters
            return []
        sender = self._routes.identify(routing_id.bytes, partial(_public_key, body[0]))
        return [(sender, message) for message in _messages(body)]

    def _describe(self, socket: zmq.Socket[bytes], frames: Sequence[zmq.Frame]) -> str:
        if socket is not self._listener:
            return super()._describe(socket, frames)
        return repr(claimed_name(frames[0].bytes))

    def close(self) -> None:
        self._authenticator.stop()
        super().close()
