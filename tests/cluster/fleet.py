"""Several machines inside this one: network, process, mount and host name spaces with sshd, on one bridge."""

import os
import shutil
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deployments.configuration.paths import ROOT

ADDRESSES = {
    "head": "10.77.0.10",
    "drafter1": "10.77.0.11",
    "drafter2": "10.77.0.12",
    "target1": "10.77.0.21",
    "target2": "10.77.0.22",
    "redis": "10.77.0.30",
    "laptop": "10.77.0.100",
    "client": "10.77.0.200",
}
SERVERS = tuple(name for name in ADDRESSES if name not in ("redis", "laptop", "client"))
_TOOLS = ("/usr/sbin/sshd", "/usr/bin/rsync", "/usr/bin/nsenter", "/usr/sbin/ip")
_HIDDEN = ("/tmp", "/run", "/var/log")  # each machine has its own
_SSH = "ssh -i /run/fleet/key -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q"


def why_not() -> str | None:
    """Why no fleet can be made here; None: it can."""
    missing = [tool for tool in _TOOLS if not Path(tool).exists()]
    hidden = [path for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)) if str(path).startswith(_HIDDEN)]
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing:
        return f"without {missing[0]}: apt-get install openssh-server rsync iproute2"
    if hidden:
        return f"{hidden[0]} can't be seen by machines that have a {hidden[0].parts[1]} of their own"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "x", "/run"], check=False
    )
    return "this root may not make namespaces" if probe.returncode else None


class Fleet:
    """The machines of ADDRESSES, while they last."""

    def __init__(self, init: subprocess.Popen[str]) -> None:
        self._init = init
        self.off: set[str] = set()
        self._expect("ready")

    def run(self, machine: str, command: str, *, stdin: str = "", timeout_s: float = 180) -> str:
        """What a command prints on a machine; fails, showing its errors, if it ends with a status other than 0."""
        done = subprocess.run(
            ["nsenter", f"--target={self._init.pid}", "--net", "--mount", *_SSH.split(), f"root@{machine}", command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{machine}: {command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def write(self, machine: str, path: str, text: str) -> None:
        """Make a file on a machine."""
        self.run(machine, f"mkdir -p $(dirname {path}) && cat > {path}", stdin=text)

    def power_off(self, machine: str) -> None:
        """End a machine without a goodbye to anyone."""
        assert self._init.stdin is not None
        self._init.stdin.write(f"{machine}\n")
        self._init.stdin.flush()
        self._expect(f"{machine} is off")
        self.off.add(machine)

    def crash(self, machine: str, *, silently: bool) -> None:
        """Kill every process of a machine but its sshd; silently: nobody hears of it, for its network is cut before."""
        self.run(machine, "setsid sh -c 'sleep 2; kill -KILL -1' < /dev/null > /dev/null 2>&1 &")
        if silently:
            self._link(machine, "down")
        time.sleep(3)  # who asked would be killed, too

    def reconnect(self, machine: str) -> None:
        """Give a machine its network back."""
        self._link(machine, "up")

    def keep_logs(self, folder: Path) -> None:
        """Ray's logs of each machine that is on, as NAME.tar.gz."""
        for machine in sorted({*SERVERS} - self.off):
            packed = self.run(machine, "cd /tmp/ray && tar -cz session_2*/logs | base64 || true")
            if packed:
                (folder / f"{machine}.tar.gz").write_bytes(b64decode(packed))

    def processes(self, machine: str, pattern: str) -> int:
        """How many processes of a machine have a title that matches; the search itself does not count."""
        return int(self.run(machine, f"pgrep -c -f '[{pattern[0]}]{pattern[1:]}' || true"))

    def _link(self, machine: str, state: str) -> None:
        command = ["nsenter", f"--target={self._init.pid}", "--net", "ip", "link", "set", f"to-{machine}", state]
        subprocess.run(command, check=True)

    def _expect(self, line: str) -> None:
        assert self._init.stdout is not None
        output = self._init.stdout.readline().strip()
        assert output == line, f"the fleet said {output!r} instead of {line!r}"


@contextmanager
def fleet() -> Iterator[Fleet]:
    """The machines, for the length of the block."""
    unshare = shutil.which("unshare")
    assert unshare is not None
    spaces = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    machines = [f"{name}={address}" for name, address in ADDRESSES.items()]
    script = str(Path(__file__).with_name("fleet.sh"))
    init = subprocess.Popen(
        [unshare, *spaces, "bash", script, str(ROOT), sys.prefix, *machines],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        },
    )
    try:
        with init:
            yield Fleet(init)
    finally:
        init.kill()
