"""`consort chat` on a real pseudo-terminal, against a scripted server: keys in, what the user sees out."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.configuration.paths import ROOT
from tests.cli.fake_server import FakeServer

_PATIENCE_S = 10.0
# Ctrl-C is a signal only to those whose controlling terminal it is.
_IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """The user's end of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def wait_for(self, text: str) -> str:
        """Everything that was shown up to and with the text, since the last call."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while text not in self._seen:
            if not select.select([self._descriptor], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} did not come, but {self._seen!r}")
            self._seen += os.read(self._descriptor, 65536).decode(errors="replace")
        before, _, self._seen = self._seen.partition(text)
        return before + text


@pytest.fixture
def session(server: FakeServer, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1"}
    command = [sys.executable, "-c", _IN_A_TERMINAL, "-m", "cli", "chat", "--url", server.url]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            yield process, Terminal(ours)
        finally:
            process.kill()
            os.close(ours)


def test_a_session(server: FakeServer, session: tuple[subprocess.Popen[bytes], Terminal]) -> None:
    process, terminal = session
    terminal.wait_for("Ctrl-D leaves.")
    terminal.wait_for("»")
    terminal.type("Tell me a story.\r")
    terminal.wait_for("Once\x1b[32m upon")
    terminal.wait_for("4 tokens")
    terminal.wait_for("1 recovered")
    server.tokens, server.token_s = [("word ", "plain")] * 1000, 0.02
    terminal.wait_for("»")
    terminal.type("/speculate off\r")
    terminal.wait_for("speculate: off")
    terminal.wait_for("»")
    terminal.type("Go on.\r")
    terminal.wait_for("word word")
    terminal.type("typed meanwhile")
    terminal.wait_for("word word")
    terminal.type("\x03")
    assert "typed" not in terminal.wait_for("stopped")
    assert server.hung_up.wait(_PATIENCE_S)
    assert server.bodies[-1]["speculate"] is False
    terminal.wait_for("»")
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D or /quit leaves.")
    terminal.wait_for("»")
    terminal.type("\x04")
    assert process.wait(_PATIENCE_S) == 0
