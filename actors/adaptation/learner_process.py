"""A drafter's learner in a process of its own, which the kernel runs only where nobody else wants the processor.

Knows nothing of what it learns. The process ends when its pipes do, so it never outlives the replica.
"""

import os
import subprocess
import sys
from queue import Empty, SimpleQueue
from threading import Thread

from actors.adaptation.messages import Begin, Failed, FromLearner, ToLearner, read_from_learner, write_message


class LearnerProcess:
    """`python -m MODULE`, which reads messages from its standard input and writes others to its standard output."""

    def __init__(self, module: str, begin: Begin) -> None:
        path = os.pathsep.join(folder for folder in sys.path if folder)  # Ray may have added the checkout's
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._received: SimpleQueue[FromLearner] = SimpleQueue()
        Thread(target=self._read, name="learner", daemon=True).start()
        self.send(begin)

    def send(self, message: ToLearner) -> None:
        """Send a message. Raises OSError if the process has ended."""
        assert self._process.stdin is not None
        write_message(self._process.stdin, message)

    def receive(self) -> list[FromLearner]:
        """Return what has come, without waiting."""
        messages: list[FromLearner] = []
        while True:
            try:
                messages.append(self._received.get_nowait())
            except Empty:
                return messages

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (message := read_from_learner(self._process.stdout)) is not None:
            self._received.put(message)
        self._received.put(Failed("the learner's process has ended"))
