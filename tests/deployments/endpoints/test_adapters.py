"""What one coordinator loads and unloads, the others and later ones learn, in whatever order they hear of it."""

from itertools import permutations
from typing import Any

import pytest

from actors.wire.messages import Adapter
from deployments.endpoints.adapters import AdapterRegistry
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service

FIRST, SECOND = Adapter("a", "/a", "1"), Adapter("a", "/a", "2")


def test_the_last_change_of_a_name_counts() -> None:
    registry = AdapterRegistry()
    seen = []
    for adapter in (FIRST, None, SECOND):
        registry.change("a", "base", adapter)
        seen.append(registry.changes)
    for order in permutations(seen):
        other = AdapterRegistry()
        for changes in order:
            other.merge(changes)
        assert other.changes == registry.changes
        assert other.changes["a"].adapter == SECOND


@pytest.fixture
def service(endpoints: dict[str, ServedEndpoint], coordinator: Any) -> Service:
    return Service(endpoints, coordinator)


def test_a_coordinator_follows_the_others(service: Service) -> None:
    registry = AdapterRegistry()
    registry.change("a", "consort", FIRST)
    service.adapters.merge(registry.changes)
    assert service.endpoint("a").endpoint.adapter == FIRST
    assert service.endpoint("a").parent == "consort"
    assert service.adapters.changes == registry.changes
    registry.change("a", "consort", SECOND)
    service.adapters.merge(registry.changes)
    assert service.endpoint("a").endpoint.adapter == SECOND
    registry.change("a", "consort", None)
    service.adapters.merge(registry.changes)
    assert list(service.endpoints) == ["consort"]


def test_an_endpoint_is_never_replaced(service: Service) -> None:
    registry = AdapterRegistry()
    registry.change("consort", "consort", Adapter("consort", "/a", "1"))
    registry.change("b", "elsewhere", FIRST)
    service.adapters.merge(registry.changes)
    registry.change("consort", "consort", None)
    service.adapters.merge(registry.changes)
    assert list(service.endpoints) == ["consort"]
    assert service.endpoint("consort").endpoint.adapter is None
