"""What replicas publish of their starts and failures, over a fake of Ray's key-value store."""

import time
from types import SimpleNamespace

import pytest

from deployments.replicas import stages as stages_module
from deployments.replicas.stages import failure_of, publish_failure, published_stages, stage_of
from engine.loading.host import stages


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    values: dict[str, bytes] = {}

    def put(key: str, value: str, *, namespace: str) -> None:
        values[key] = value.encode()

    monkeypatch.setattr(stages_module, "_internal_kv_put", put)
    monkeypatch.setattr(stages_module, "_internal_kv_get", lambda key, *, namespace: values.get(key))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(deployment="Target-t"))
    return values


def test_a_start_is_followed_from_outside(store: dict[str, bytes]) -> None:
    assert stage_of("Target-t") == "starting its process"
    with published_stages():
        stages.info("reading the weights of %s", "t")
        assert stage_of("Target-t") == "reading the weights of t"
    stages.info("of another replica in this process")
    assert stage_of("Target-t") == "loading"
    assert list(store) == ["Target-t"]


def test_a_failure_is_kept(store: dict[str, bytes]) -> None:
    assert failure_of("Target-t") is None
    before_s = time.time()
    publish_failure("the loop has been stuck for 12 s")
    failure = failure_of("Target-t")
    assert failure is not None
    assert before_s <= failure[0] <= time.time()
    assert failure[1] == "the loop has been stuck for 12 s"


def test_a_start_goes_on_while_rays_head_is_away(monkeypatch: pytest.MonkeyPatch, store: dict[str, bytes]) -> None:
    def put(key: str, value: str, *, namespace: str) -> None:
        raise ConnectionError

    monkeypatch.setattr(stages_module, "_internal_kv_put", put)
    with published_stages():
        stages.info("importing torch")
    publish_failure("the loop ended")
    assert not store
