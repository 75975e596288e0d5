"""On a head: kill GCS alone, and start it again as it was after so many seconds. `python - PROCESS SECONDS`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(process: str, seconds: str) -> None:
    facts = Path("/proc", process)
    command = (facts / "cmdline").read_bytes().split(b"\0")[:-1]
    environment = dict(line.split(b"=", 1) for line in (facts / "environ").read_bytes().split(b"\0") if line)
    folder = (facts / "cwd").readlink()
    os.kill(int(process), signal.SIGKILL)
    time.sleep(float(seconds))
    nothing = subprocess.DEVNULL
    subprocess.Popen(
        command, cwd=folder, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
