"""Authenticated names of peers, and the routing ids by which a listener reaches them. Knows nothing of sockets.

A name ends with a fingerprint of its owner's CURVE key. ZeroMQ reports the key that authenticated each batch, so no
peer can use another's name. Whoever knows a routing id can take it over. So routing ids end with secret bytes.
"""

import hashlib
import secrets
from collections.abc import Callable

_DIGITS = 16  # of a fingerprint: finding another key with the same one takes 2^64 tries
_SEPARATOR = b"\0"
_SECRET_BYTES = 16
_MAX_PEERS = 10_000


def name_with_key(prefix: str, public_key: bytes) -> str:
    """Return the name that belongs to a CURVE public key (Z85)."""
    return f"{prefix}-{hashlib.sha256(public_key).hexdigest()[:_DIGITS]}"


def new_routing_id(name: str) -> bytes:
    """Return a routing id for a new connection. name: at most 238 bytes."""
    return name.encode() + _SEPARATOR + secrets.token_bytes(_SECRET_BYTES)


def claimed_name(routing_id: bytes) -> bytes:
    """Return the name in a routing id, without the secret bytes."""
    return routing_id.partition(_SEPARATOR)[0]


class PeerRoutes:
    """Routing ids of one listener's peers, by name. Beyond _MAX_PEERS the oldest are forgotten."""

    def __init__(self) -> None:
        self._routing_ids: dict[str, bytes] = {}
        self._unreachable: set[str] = set()  # known peers that had no connection at the last attempt to send

    def note_reached(self, name: str, reached: bool) -> None:
        """Note whether a known peer had a connection when something was sent to it."""
        if reached:
            self._unreachable.discard(name)
        else:
            self._unreachable.add(name)

    def reaches(self, name: str) -> bool:
        """Whether nothing says that a peer is gone."""
        return name not in self._unreachable

    def get(self, name: str) -> bytes | None:
        """Return the routing id of a known peer."""
        return self._routing_ids.get(name)

    def identify(self, routing_id: bytes, public_key: Callable[[], bytes]) -> str:
        """Return the name of a batch's sender. public_key: returns the key that authenticated a new connection.

        Raises:
            ValueError: the name does not belong to the key.
        """
        name = claimed_name(routing_id).decode()
        if self._routing_ids.get(name) == routing_id:
            return name
        if name != name_with_key(name.rpartition("-")[0], public_key()):
            raise ValueError("the name is not that of the sender's key")
        self._routing_ids.pop(name, None)
        self._routing_ids[name] = routing_id
        if len(self._routing_ids) > _MAX_PEERS:  # a live peer comes back with its next message
            oldest = next(iter(self._routing_ids))
            del self._routing_ids[oldest]
            self._unreachable.discard(oldest)
        return name
