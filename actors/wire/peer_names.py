"""Names that only their owner can use, and the connection through which a listener reaches each of them.

A name ends with a fingerprint of its owner's CURVE key. ZeroMQ tells a listener which key a batch came with, so nobody
can speak for somebody else. What a listener says goes by routing ids, which a newer connection may take over: they end
with bytes that only the two ends of a connection know. Knows nothing of sockets.
"""

import hashlib
import secrets
from collections.abc import Callable

_DIGITS = 16  # of a fingerprint: it takes 2^64 tries to find a key for somebody else's
_SEPARATOR = b"\0"
_SECRET_BYTES = 16
_MAX_PEERS = 10_000


def name_with_key(prefix: str, public_key: bytes) -> str:
    """Return the name of a key's owner. public_key: CURVE, Z85."""
    return f"{prefix}-{hashlib.sha256(public_key).hexdigest()[:_DIGITS]}"


def new_routing_id(name: str) -> bytes:
    """Return what a new connection is called at the listener's end. name: of at most 238 bytes."""
    return name.encode() + _SEPARATOR + secrets.token_bytes(_SECRET_BYTES)


def claimed_name(routing_id: bytes) -> bytes:
    """Return the name that a connection claims, without what is secret."""
    return routing_id.partition(_SEPARATOR)[0]


class PeerRoutes:
    """The routing ids of one listener's peers, by name. It forgets the oldest rather than to grow for ever."""

    def __init__(self) -> None:
        self._routing_ids: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        """Return the routing id of a peer that has written."""
        return self._routing_ids.get(name)

    def identify(self, routing_id: bytes, public_key: Callable[[], bytes]) -> str:
        """Return who wrote. public_key: of a new connection, what it was authenticated with; CURVE, Z85.

        Raises:
            ValueError: the name is not that key's.
        """
        name = claimed_name(routing_id).decode()
        if self._routing_ids.get(name) == routing_id:
            return name
        if name != name_with_key(name.rpartition("-")[0], public_key()):
            raise ValueError("the name is not that of the sender's key")
        self._routing_ids.pop(name, None)
        self._routing_ids[name] = routing_id
        if len(self._routing_ids) > _MAX_PEERS:  # one of them that is alive comes back with its next message
            del self._routing_ids[next(iter(self._routing_ids))]
        return name
