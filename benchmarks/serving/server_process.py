"""A server in its own process group, which starts on construction and ends with the `with` block."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_POLL_S = 0.2
_GRACE_S = 60.0


class ServerProcess:
    """Base class. Subclasses give the command and a readiness check."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        ready: Callable[[], bool],
        start_s: float,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        ready: returns whether the server answers.
        start_s: maximum seconds until it is ready.
        """
        self._ready, self._start_s, self._log = ready, start_s, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, process_group=0, env=environment and dict(environment)
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        """Wait until the server answers. Raises RuntimeError if it ends or takes too long."""
        deadline_s = time.monotonic() + self._start_s
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self._stop()
                raise RuntimeError(f"the server did not come up; see {self._log}")
            time.sleep(_POLL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def pause(self) -> None:
        """Stop the process group until `resume`."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def _stop(self) -> None:
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
