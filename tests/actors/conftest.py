import pytest

from tests.support.coordinator_stage import Stage


@pytest.fixture
def stage() -> Stage:
    return Stage(max_requests=3, max_silence_s=20, max_unassigned_s=100)
