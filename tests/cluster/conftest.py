"""The machines that tests of whole clusters run on."""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.fleet import Fleet, fleet, why_not

_WANTED = "CONSORT_TEST_FLEET"


@pytest.fixture
def machines() -> Iterator[Fleet]:
    if _WANTED not in os.environ:
        pytest.skip(f"takes minutes; {_WANTED}=1, or make test-cluster, runs it")
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with fleet() as machines:
        yield machines
