import pytest

from tests.support.coordinator_stage import Stage


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch, max_requests=3, max_silence_s=20, max_unplaced_s=100)
