"""Prometheus' text of several coordinators' metrics, told apart by a label. Knows no HTTP."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

COORDINATOR_LABEL = "coordinator"


def with_coordinator(families: Iterable[Metric], coordinator: str) -> list[Metric]:
    """Return the families with the coordinator's name in a label of every sample."""
    return [
        _copy(family, [{**sample.labels, COORDINATOR_LABEL: coordinator} for sample in family.samples])
        for family in families
    ]


def exposition(parts: Iterable[Sequence[Metric]]) -> bytes:
    """Return all families in Prometheus' text format. Families of the same name become one."""
    return generate_latest(_Merged(parts))


class _Merged(Collector):
    def __init__(self, parts: Iterable[Sequence[Metric]]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for family in (family for part in self._parts for family in part):
            if family.name in merged:
                merged[family.name].samples += family.samples
            else:
                merged[family.name] = _copy(family, [sample.labels for sample in family.samples])
        yield from merged.values()


def _copy(family: Metric, labels: Sequence[dict[str, str]]) -> Metric:
    copied = Metric(family.name, family.documentation, family.type, family.unit)
    pairs = zip(family.samples, labels, strict=True)
    copied.samples = [sample._replace(labels=own) for sample, own in pairs]
    return copied
