"""A drafter's side of its online adaptation: what its learner gets, when it may work, and what is published.

After Liu et al. 2023, "Online speculative decoding", arXiv 2310.07177. The learner runs in a process of its own;
messages on its pipes are a length of 4 bytes, and msgpack.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import IO, Protocol, TypeVar

import msgspec

from actors.wire.messages import AdaptationState
from decoding.errors import ConsortError
from decoding.sampling.params import SamplingParams

_LENGTH_BYTES = 4
_log = logging.getLogger(__name__)


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

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
to_learner: msgspec.msgpack.Decoder[ToLearner] = msgspec.msgpack.Decoder(ToLearner)
_from_learner: msgspec.msgpack.Decoder[FromLearner] = msgspec.msgpack.Decoder(FromLearner)


def write_message(stream: IO[bytes], message: ToLearner | FromLearner) -> None:
    """Write a message. Raises OSError if nobody reads any more."""
    data = _encoder.encode(message)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def read_message(stream: IO[bytes], decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """Return the next message; None at the end. Waits for it."""
    head = stream.read(_LENGTH_BYTES)
    size = int.from_bytes(head, "big")
    data = stream.read(size) if len(head) == _LENGTH_BYTES else b""
    return decoder.decode(data) if data and len(data) == size else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptationOptions:
    """How a drafter adapts."""

    module: str  # that the learner's process runs
    texts: int = 256  # the most recent ones that are learned
    update_after: int = 32  # new texts before the next round
    learning_rate: float = 5e-4


class Learner(Protocol):
    """Learns when told to, elsewhere."""

    def send(self, message: ToLearner) -> None:
        """Send a message. Raises OSError if the learner has ended."""

    def receive(self) -> list[FromLearner]:
        """Return what has come, without waiting."""

    def close(self) -> None:
        """End the learner."""


class Adaptation:
    """The adaptation of one replica. The learner starts with the first round, and is not started twice."""

    def __init__(
        self, options: AdaptationOptions, start: Callable[[], Learner], publish: Callable[[str], None]
    ) -> None:
        """
        start: starts the learner; raises OSError if it can't.
        publish: puts the weights in a folder, which is removed then, into the model; raises a ConsortError, ValueError
            or RuntimeError if it can't, and leaves the model as it was.
        """
        self.state = AdaptationState()
        self._update_after = options.update_after
        self._start, self._publish = start, publish
        self._texts: deque[CommittedText] = deque(maxlen=options.texts)
        self._learner: Learner | None = None
        self._working = self._ended = False

    def note(self, tokens: Sequence[int], prompt_length: int, params: SamplingParams) -> None:
        """Keep a text that has ended, in memory, until the learner gets it."""
        if not self._ended and len(tokens) > prompt_length:
            self._texts.append(CommittedText(list(tokens), prompt_length, params))

    def turn(self, *, idle: bool) -> None:
        """Let the learner work or pause, and publish what it has learned. Call it in the loop's thread.

        idle: whether the drafter has no requests. Only then anything but a pause is sent or published.
        """
        try:
            if self._learner is None:
                if self._ended or not idle or len(self._texts) < self._update_after:
                    return
                self._learner = self._start()
            if idle:
                for message in self._learner.receive():
                    self._handle(message)
            if not self._ended:
                self._tell(self._learner, idle)
        except OSError as error:
            self._end(f"there is no learner: {error}")

    def close(self) -> None:
        """End the learner."""
        self._ended = True
        self._texts.clear()
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    def _tell(self, learner: Learner, idle: bool) -> None:
        if idle and self._texts:
            learner.send(Texts(list(self._texts)))
            self._texts.clear()
        if idle != self._working:
            learner.send(Work() if idle else Pause())
            self._working = idle

    def _handle(self, checked: FromLearner) -> None:
        if isinstance(checked, Failed):
            self._end(checked.reason)
            return
        updates = self.state.updates
        if checked.folder is not None:
            try:
                self._publish(checked.folder)
            except (ConsortError, ValueError, RuntimeError) as error:
                self._end(f"new weights can't be published: {error}")
                return
            shutil.rmtree(checked.folder, ignore_errors=True)
            updates += 1
        self.state = AdaptationState(updates, checked.texts, checked.acceptance_before, checked.acceptance_after)

    def _end(self, reason: str) -> None:
        _log.warning("the drafter adapts no further: %s", reason)
        self.close()


class LearnerProcess:
    """`python -m MODULE`, which reads messages from its standard input and writes others to its standard output.

    It ends when its pipes do, so it never outlives the replica. The kernel runs it only where nobody else wants the
    processor.
    """

    def __init__(self, module: str, begin: Begin) -> None:
        path = os.pathsep.join(folder for folder in sys.path if folder)  # Ray may have added the checkout's
        self._folder = tempfile.mkdtemp(prefix="consort-adaptation-")  # ours to remove: the process may be killed
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "TMPDIR": self._folder,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._received: SimpleQueue[FromLearner] = SimpleQueue()
        self._outbox: SimpleQueue[ToLearner | None] = SimpleQueue()
        for work in (self._read, self._write):
            Thread(target=work, name="learner", daemon=True).start()
        self.send(begin)

    def send(self, message: ToLearner) -> None:
        """Send a message, without waiting until the process reads it. Raises OSError if it has ended."""
        if self._process.poll() is not None:
            raise OSError(f"its process has ended with status {self._process.returncode}")
        self._outbox.put(message)

    def receive(self) -> list[FromLearner]:
        return [self._received.get() for _ in range(self._received.qsize())]  # nobody else takes any

    def close(self) -> None:
        """End the process, and remove its files."""
        self._outbox.put(None)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the process has ended, as `_read` notices
            while (message := self._outbox.get()) is not None:
                write_message(self._process.stdin, message)

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (message := read_message(self._process.stdout, _from_learner)) is not None:
            self._received.put(message)
        self._received.put(Failed("the learner's process has ended"))
