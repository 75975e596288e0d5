"""The provider of hosts in pools, with a command runner that only notes what it was told."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest
from ray.autoscaler import tags as ray_tags

from cluster.pools import HostBook, PoolProvider

CONFIG: dict[str, Any] = {
    "head_ip": "127.0.0.1",
    "pools": {"drafter": ["127.0.0.2", "127.0.0.3"], "target": ["127.0.0.4"]},
    "auth": {"ssh_user": "root"},
}
HEAD = {ray_tags.TAG_RAY_NODE_KIND: ray_tags.NODE_KIND_HEAD}
WORKER = {ray_tags.TAG_RAY_NODE_KIND: ray_tags.NODE_KIND_WORKER}
DRAFTER = WORKER | {ray_tags.TAG_RAY_USER_NODE_TYPE: "drafter"}


class NotedRunner:
    def __init__(self, host: str, notes: list[str]) -> None:
        self._host, self._notes = host, notes

    def run(self, command: str, timeout: int) -> None:
        assert command.startswith("ray stop")
        assert timeout > 0
        self._notes.append(self._host)
        if self._host == "127.0.0.3":
            raise click.ClickException("no route to host")


@pytest.fixture
def stopped() -> list[str]:
    return []


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: list[str]) -> PoolProvider:
    monkeypatch.setenv("HOME", str(tmp_path))
    provider = PoolProvider(CONFIG, "test")
    monkeypatch.setattr(provider, "get_command_runner", lambda *, node_id, **_: NotedRunner(node_id, stopped))
    return provider


def test_types_come_and_go_apart(provider: PoolProvider, stopped: list[str]) -> None:
    assert list(provider.create_node({}, DRAFTER, 2)) == CONFIG["pools"]["drafter"]
    assert provider.non_terminated_nodes(WORKER) == CONFIG["pools"]["drafter"]
    assert provider.non_terminated_nodes(HEAD) == []
    with pytest.raises(RuntimeError, match="needs 1 hosts, but of"):
        provider.create_node({}, DRAFTER, 1)
    target = WORKER | {ray_tags.TAG_RAY_USER_NODE_TYPE: "target"}
    assert list(provider.create_node({}, target, 1)) == ["127.0.0.4"]
    provider.terminate_nodes(["127.0.0.2"])
    assert stopped == ["127.0.0.2"]
    assert provider.is_terminated("127.0.0.2")
    assert provider.is_running("127.0.0.4")


def test_a_host_that_can_not_be_reached_is_given_back_and_taken_last(provider: PoolProvider) -> None:
    provider.create_node({}, DRAFTER, 2)
    provider.terminate_node("127.0.0.3")
    provider.terminate_node("127.0.0.2")
    provider.terminate_node("127.0.0.3")  # is free already, and keeps its turn
    assert list(provider.create_node({}, DRAFTER, 1)) == ["127.0.0.3"]
    provider.terminate_node("127.0.0.3")
    assert list(provider.create_node({}, DRAFTER, 1)) == ["127.0.0.2"]


def test_tags_belong_to_hosts_in_use(provider: PoolProvider) -> None:
    provider.create_node({}, DRAFTER, 1)
    provider.set_node_tags("127.0.0.2", {"state": "up"})
    provider.set_node_tags("127.0.0.3", {"state": "up"})
    assert provider.node_tags("127.0.0.2") == DRAFTER | {"state": "up"}
    assert provider.node_tags("127.0.0.3") == {}
    assert provider.internal_ip("127.0.0.2") == provider.external_ip("127.0.0.2") == "127.0.0.2"


def test_the_heads_own_provider_finds_the_head_in_use(provider: PoolProvider) -> None:
    cluster: dict[str, Any] = {"provider": dict(CONFIG), "auth": {"ssh_user": "other"}, "head_node_type": "head"}
    config = provider.prepare_for_head_node(cluster)["provider"]
    assert config["auth"] == {"ssh_user": "other"}
    there = PoolProvider(config, "test")
    assert there.non_terminated_nodes(HEAD) == ["127.0.0.1"]
    assert PoolProvider(config, "test").non_terminated_nodes(HEAD) == ["127.0.0.1"]


def test_teardown_reaches_every_host_once(provider: PoolProvider, stopped: list[str]) -> None:
    everything = provider.nodes_for_teardown(HEAD) + provider.nodes_for_teardown(WORKER)
    assert everything == ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
    provider.terminate_nodes(everything)
    assert sorted(stopped) == everything
    assert provider.nodes_for_teardown(HEAD) + provider.nodes_for_teardown(WORKER) == []
    provider.terminate_nodes([])


def test_no_host_is_given_out_twice(tmp_path: Path) -> None:
    hosts = [f"host-{i}" for i in range(24)]
    book = HostBook(tmp_path / "deep" / "book.json")
    with ThreadPoolExecutor(8) as pool:
        taken = [host for (host,) in pool.map(lambda _: book.take(hosts, {}, 1), hosts)]
    assert sorted(taken) == sorted(hosts)
    assert set(HostBook(tmp_path / "deep" / "book.json").taken()) == set(hosts)
