"""On a head: kill GCS alone, and after so many seconds start it again as it was. `python - SECONDS`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(seconds: str) -> None:
    (process,) = (one for one in Path("/proc").glob("[0-9]*") if b"/gcs/gcs_server\0" in (one / "cmdline").read_bytes())
    command = (process / "cmdline").read_bytes().split(b"\0")[:-1]
    lines = (process / "environ").read_bytes().split(b"\0")
    environment = dict(line.split(b"=", 1) for line in lines if line)
    folder = (process / "cwd").readlink()
    os.kill(int(process.name), signal.SIGKILL)
    time.sleep(float(seconds))
    nothing = subprocess.DEVNULL
    subprocess.Popen(
        command, cwd=folder, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
    )


if __name__ == "__main__":
    main(sys.argv[1])
