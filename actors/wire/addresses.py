"""Addresses of replicas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """A replica's name, model and endpoint. Local links go by the name and leave `uri` and `public_key` empty."""

    name: str  # unique among replicas, also across restarts
    model: str  # the configured model that it runs
    uri: str = ""  # tcp://host:port
    public_key: bytes = b""  # CURVE, Z85
