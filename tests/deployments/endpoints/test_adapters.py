"""What one coordinator loads and unloads, the others and later ones learn, in whatever order they hear of it."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from actors.wire.messages import Adapter
from decoding.errors import InvalidRequestError
from deployments.endpoints.adapters import AdapterRegistry, read_adapter
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from engine.loading.lora import read_lora
from tests.support.adapters import save_adapter
from tests.support.models import tiny_model

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


def test_an_adapter_comes_with_the_drafters_in_its_folder(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny_model("llama"), 1, target_modules=["q_proj"])
    assert read_adapter("a", str(tmp_path)).drafter is None
    nested = tmp_path / "drafter"
    save_adapter(nested, tiny_model("llama"), 2, target_modules=["q_proj"])
    version = read_lora(str(nested)).version
    assert read_adapter("a", str(tmp_path)).drafter == Adapter("a", str(nested), version)
    (nested / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match=r"lora_path: .*drafter.* has no adapter_model\.safetensors"):
        read_adapter("a", str(tmp_path))
