"""Messages between a drafter's replica and its learner, over the pipes of the learner's process.

A message is its length, 4 bytes, and msgpack. Knows nothing of models.
"""

from typing import IO

import msgspec

from decoding.sampling.params import SamplingParams

_LENGTH_BYTES = 4


class CommittedText(msgspec.Struct, frozen=True):
    """A request's prompt and as much of its answer as the drafter heard of."""

    tokens: list[int]
    prompt_length: int
    params: SamplingParams


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To the learner, first: what to learn, and how."""

    path: str  # the drafter's checkpoint: a folder, a .gguf file or a Hub id
    revision: str | None
    trust_remote_code: bool
    safetensors_only: bool
    adapter: str | None
    texts: int  # the most recent texts to keep
    update_after: int  # new texts before the next round
    learning_rate: float


class Texts(msgspec.Struct, frozen=True, tag=True):
    """To the learner: texts since the last message."""

    texts: list[CommittedText]


class Work(msgspec.Struct, frozen=True, tag=True):
    """To the learner: the replica is idle."""


class Pause(msgspec.Struct, frozen=True, tag=True):
    """To the learner: stop after the present step."""


class Checked(msgspec.Struct, frozen=True, tag=True):
    """From the learner, after a round: what recent texts that it did not learn say."""

    texts: int  # on which acceptance was measured
    acceptance_before: float  # share of their tokens that the drafter's files would have drafted
    acceptance_after: float  # share that the published weights would have drafted
    folder: str | None = None  # a checkpoint with new weights to publish; None: they are not better


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the learner, last: why it ends."""

    reason: str


ToLearner = Begin | Texts | Work | Pause
FromLearner = Checked | Failed

_encoder = msgspec.msgpack.Encoder()
_to_learner: msgspec.msgpack.Decoder[ToLearner] = msgspec.msgpack.Decoder(ToLearner)
_from_learner: msgspec.msgpack.Decoder[FromLearner] = msgspec.msgpack.Decoder(FromLearner)


def write_message(stream: IO[bytes], message: ToLearner | FromLearner) -> None:
    """Write a message. Raises OSError if nobody reads any more."""
    data = _encoder.encode(message)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def read_for_learner(stream: IO[bytes]) -> ToLearner | None:
    """Return the next message to a learner; None at the end. Waits for it."""
    data = _read(stream)
    return None if data is None else _to_learner.decode(data)


def read_from_learner(stream: IO[bytes]) -> FromLearner | None:
    """Return the next message from a learner; None at the end. Waits for it."""
    data = _read(stream)
    return None if data is None else _from_learner.decode(data)


def _read(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "big")
    data = stream.read(size)
    return data if len(data) == size else None
