"""A drafter's learner in a process of its own, which the kernel runs only where nobody else wants the processor.

Knows nothing of what it learns. The process ends when its pipes do, so it never outlives the replica.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from actors.adaptation.messages import Begin, Failed, FromLearner, ToLearner, read_from_learner, write_message


class LearnerProcess:
    """`python -m MODULE`, which reads messages from its standard input and writes others to its standard output."""

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
        """Return what has come, without waiting."""
        messages: list[FromLearner] = []
        while True:
            try:
                messages.append(self._received.get_nowait())
            except Empty:
                return messages

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
        while (message := read_from_learner(self._process.stdout)) is not None:
            self._received.put(message)
        self._received.put(Failed("the learner's process has ended"))
