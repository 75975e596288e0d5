"""What a starting replica does, and why one failed, in Ray's key-value store, for the command and the status."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put  # no public store needs no actor

from engine.loading.host import stages

_NAMESPACE = "consort-stages"


class _Publisher(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._deployment = serve.get_replica_context().deployment

    def emit(self, record: logging.LogRecord) -> None:
        _put(self._deployment, record.getMessage())


def _put(key: str, value: str) -> None:
    with suppress(Exception):  # Ray's head is away; the replica goes on all the same
        _internal_kv_put(key, value, namespace=_NAMESPACE)


@contextmanager
def published_stages() -> Iterator[None]:
    """Publish in the block what this process logs to `stages`."""
    publisher = _Publisher()
    stages.addHandler(publisher)
    stages.setLevel(logging.INFO)
    try:
        yield
    finally:
        stages.info("loading")
        stages.removeHandler(publisher)


def stage_of(deployment: str) -> str:
    """Return what a starting replica of the deployment does. The call may block while Ray's head is away."""
    stage: bytes | None = _internal_kv_get(deployment, namespace=_NAMESPACE)
    return "starting its process" if stage is None else stage.decode()


def publish_failure(reason: str) -> None:
    """Publish why this replica is to be replaced."""
    _put(f"{serve.get_replica_context().deployment}#failure", json.dumps([time.time(), reason]))


def failure_of(deployment: str) -> tuple[float, str] | None:
    """Return the Unix time of the last failure of a deployment's replicas, and its reason. Blocks as `stage_of` may."""
    failure: bytes | None = _internal_kv_get(f"{deployment}#failure", namespace=_NAMESPACE)
    return None if failure is None else tuple(json.loads(failure))
