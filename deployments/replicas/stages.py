"""What a deployment's starting replica is doing, in Ray's key-value store: `consort serve` and the status show it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put  # no public store needs no actor

from engine.loading.host import stages

_NAMESPACE = "consort-stages"


class _Publisher(logging.Handler):
    def __init__(self, deployment: str) -> None:
        super().__init__()
        self._deployment = deployment

    def emit(self, record: logging.LogRecord) -> None:
        self.publish(record.getMessage())

    def publish(self, stage: str) -> None:
        with suppress(Exception):  # Ray's head is away; the replica can start all the same
            _internal_kv_put(self._deployment, stage, namespace=_NAMESPACE)


@contextmanager
def published_stages() -> Iterator[None]:
    """Publish in the block what this process logs to `stages`."""
    publisher = _Publisher(serve.get_replica_context().deployment)
    stages.addHandler(publisher)
    stages.setLevel(logging.INFO)
    try:
        yield
    finally:
        stages.removeHandler(publisher)
        publisher.publish("loading")


def stage_of(deployment: str) -> str:
    """Return what a starting replica of the deployment does. The call may block while Ray's head is away."""
    stage: bytes | None = _internal_kv_get(deployment, namespace=_NAMESPACE)
    return "starting its process" if stage is None else stage.decode()
