"""The machines that tests of whole clusters run on."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.cluster.fleet import Fleet, fleet, why_not

_WANTED = "CONSORT_TEST_FLEET"
_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = report.failed
    return report


@pytest.fixture
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    if _WANTED not in os.environ:
        pytest.skip(f"takes minutes; {_WANTED}=1, or make test-cluster, runs it")
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with fleet() as machines:
        yield machines
        if request.node.stash.get(_failed, False):
            machines.keep_logs(tmp_path)
            print(f"the machines' logs are in {tmp_path}")
