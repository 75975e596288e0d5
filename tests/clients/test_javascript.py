"""Runs the suite of clients in JavaScript (javascript/suite.test.mjs), where node and npm have installed them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "javascript" / "suite.test.mjs"
INSTALLED = Path(".bench/javascript")


@pytest.mark.skipif(
    not (INSTALLED / "node_modules").exists(), reason="`make test-clients` installs them if npm is there"
)
def test_javascript(default_url: str) -> None:
    suite = shutil.copy(SUITE, INSTALLED)  # modules are looked for beside it
    environment = {**os.environ, "CONSORT_DEFAULT_URL": default_url}
    done = subprocess.run(
        ["node", "--test", "--test-timeout=120000", "--test-reporter=spec", suite],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
