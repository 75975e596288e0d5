"""Every kind of replica, and the proxy, killed, scaled, updated under OpenAI's client: nothing lost or different."""

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.configuration.paths import ROOT

# What is needed for one of each kind; the faults of single models have tests of their own.
OPTIONS = {
    "kills": 0,
    "hangs": 0,
    "controller-kills": 0,
    "coordinator-kills": 1,
    "proxy-kills": 1,
    "updates": 1,
    "scalings": 1,
    "streams": 3,
    "prompts": 4,
    "new-tokens": 60,
}


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(2400)
def test_no_request_is_lost_or_differs(tmp_path: Path) -> None:
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "tests.chaos", "serve", *options, f"--output={tmp_path / 'chaos.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
