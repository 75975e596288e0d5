"""Where replicas are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """A replica, and where it listens. Local links find each other by name and leave `uri` and `public_key` empty."""

    name: str  # unique among replicas, also across restarts
    model: str  # the configured model that it runs
    uri: str = ""  # tcp://host:port
    public_key: bytes = b""  # CURVE, Z85
