"""Addresses of replicas, and the protocol that they speak."""

import msgspec

# Number of the messages' format. Raise it when older and newer versions would misread each other, as where a field is
# renamed or required; a new field with a default is no reason. Coordinators use replicas of their own number only.
PROTOCOL = 2


class ReplicaAddress(msgspec.Struct, frozen=True):
    """A replica's name, model and endpoint. Local links go by the name and leave `uri` and `public_key` empty."""

    name: str  # unique among replicas, also across restarts
    model: str  # the configured model that it runs
    uri: str = ""  # tcp://host:port
    public_key: bytes = b""  # CURVE, Z85
    protocol: int = PROTOCOL
