"""Commands that run while a test does."""

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deployments.configuration.paths import ROOT

_STOP_S = 200.0  # longer than `http.drain_s` and the limit on Ray's end together


@contextmanager
def running(
    command: Sequence[str],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    stderr: int | None = None,
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator["subprocess.Popen[str]"]:
    """Start a command whose output can be read, and stop it at the end.

    Raises:
        subprocess.TimeoutExpired: it did not stop and was killed; the test would wait for ever.
    """
    with subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(stop)  # does nothing to one that has ended
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
