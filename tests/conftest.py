"""What every test shares: the environment. It is set before torch, Ray or transformers is first imported."""

import logging
import os
import secrets
import signal
from typing import TYPE_CHECKING

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "100000",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # or actors crawl while another process tests, and time limits end
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or Ray replaces a loopback address by the host's outward one
    # Ray listens on every interface, so a test's cluster keeps token authentication, with its own token.
    # Left to itself, ray.init() writes one to ~/.ray, which switches later `ray start` commands to tokens.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}.items():
    os.environ.setdefault(name, value)

# What shells start in the background ignores Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
import torch  # noqa: E402

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

_SERVER = "tests/server/"

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for GPUs run on the CPU


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """pytest's, which also sees what Ray's loggers say: Ray gives them handlers and levels once it is imported."""
    for name in ("ray", "ray.serve"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "disabled", False)
        caplog.set_level(logging.INFO, logger=name)
    return caplog


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of servers come early: they wait more than they compute, so they cost least beside others.

    Not first, when kernels are not compiled and nothing is in the cache of files: their commands have time limits.
    """
    items.sort(key=lambda item: (not item.nodeid.startswith("tests/actors/"), not item.nodeid.startswith(_SERVER)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadFileScheduling":
    """Give each file to one process, but the tests of servers as a whole, so that they share one server."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _SERVER if nodeid.startswith(_SERVER) else super()._split_scope(nodeid)

    return Scheduling(config, log)
