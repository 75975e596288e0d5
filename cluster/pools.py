"""A node provider for `ray up` over fixed hosts in pools, one pool for each type of worker.

Ray's own provider for fixed hosts has one type of worker and keeps all hosts in use. Here each type joins and leaves
between its `min_workers` and `max_workers`. The provider runs where `ray up` runs, which knows only the head, and on
the head, which knows all hosts.
"""

import copy
import json
import logging
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from filelock import FileLock
from ray.autoscaler import tags as ray_tags
from ray.autoscaler.node_provider import NodeProvider

Tags = dict[str, str]

_CONNECT_TIMEOUT_S = 10
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entries:
    taken: dict[str, Tags] = field(default_factory=dict)
    given_back: list[str] = field(default_factory=list)  # the most recent last


class HostBook:
    """The hosts in use. Changes are atomic, and locked against other threads and processes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def taken(self) -> dict[str, Tags]:
        return self._read().taken

    def take(self, pool: Sequence[str], tags: Tags, count: int) -> list[str]:
        """Take `count` free hosts of a pool; raises RuntimeError if there are fewer.

        Those go first that have been free the longest, so a dead host does not keep healthy ones from use.
        """
        with self._locked_entries() as entries:
            turns = {host: turn for turn, host in enumerate(entries.given_back)}
            free = sorted((host for host in pool if host not in entries.taken), key=lambda host: turns.get(host, -1))
            if len(free) < count:
                raise RuntimeError(f"needs {count} hosts, but of {list(pool)} only {free} are free")
            chosen = free[:count]
            entries.taken |= {host: dict(tags) for host in chosen}
            return chosen

    def tag(self, host: str, tags: Tags) -> None:
        """Add tags to a host, unless it was given back meanwhile."""
        with self._locked_entries() as entries:
            if host in entries.taken:
                entries.taken[host] |= tags

    def give_back(self, host: str) -> None:
        """Free a host; nothing happens if it is free."""
        with self._locked_entries() as entries:
            if entries.taken.pop(host, None) is not None:
                entries.given_back = [other for other in entries.given_back if other != host] + [host]

    def _read(self) -> _Entries:
        try:
            return _Entries(**json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return _Entries()

    @contextmanager
    def _locked_entries(self) -> Iterator[_Entries]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._path}.lock"):
            entries = self._read()
            yield entries
            written = self._path.with_suffix(".new")
            written.write_text(json.dumps(asdict(entries)), encoding="utf-8")
            written.replace(self._path)


class PoolProvider(NodeProvider):
    """Configured by `provider: {type: external, module: cluster.pools.PoolProvider, head_ip: …, pools: {…}}`."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._head: str = provider_config["head_ip"]
        self._pools: dict[str, list[str]] = provider_config["pools"]
        self._file = f".consort/{cluster_name}-hosts.json"  # in the home directory
        self._book = HostBook(Path.home() / self._file)
        self._torn_down: set[str] = set()
        if "head_tags" in provider_config and self._head not in self._book.taken():
            self._book.take([self._head], provider_config["head_tags"], 1)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration with the provider's additions; raises ValueError if the pools are wrong."""
        config = copy.deepcopy(cluster_config)
        _check_pools(config)
        config["provider"]["auth"] = config["auth"]
        return config

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration for the provider on the head, where the head counts as in use."""
        cluster_config["provider"] |= {
            "auth": cluster_config["auth"],  # the key on the head differs
            "head_tags": {
                ray_tags.TAG_RAY_NODE_KIND: ray_tags.NODE_KIND_HEAD,
                ray_tags.TAG_RAY_NODE_NAME: f"ray-{self.cluster_name}-head",
                ray_tags.TAG_RAY_NODE_STATUS: ray_tags.STATUS_UP_TO_DATE,
                ray_tags.TAG_RAY_USER_NODE_TYPE: cluster_config["head_node_type"],
            },
        }
        return cluster_config

    def non_terminated_nodes(self, tag_filters: Tags) -> list[str]:
        return [host for host, tags in self._book.taken().items() if tag_filters.items() <= tags.items()]

    def nodes_for_teardown(self, tag_filters: Tags) -> list[str]:
        """Return all hosts of a kind that were not stopped yet: `ray down` does not know which are in use."""
        workers = [host for pool in self._pools.values() for host in pool]
        is_head = tag_filters.get(ray_tags.TAG_RAY_NODE_KIND) == ray_tags.NODE_KIND_HEAD
        return [host for host in ([self._head] if is_head else workers) if host not in self._torn_down]

    def is_running(self, node_id: str) -> bool:
        return node_id in self._book.taken()

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> Tags:
        return self._book.taken().get(node_id, {})

    def set_node_tags(self, node_id: str, tags: Tags) -> None:
        self._book.tag(node_id, tags)

    def internal_ip(self, node_id: str) -> str:
        return socket.gethostbyname(node_id)

    def external_ip(self, node_id: str) -> str:
        return self.internal_ip(node_id)  # `ray up` runs on the same network

    def create_node(self, node_config: dict[str, Any], tags: Tags, count: int) -> dict[str, Any]:
        """Take free hosts of the pool; raises RuntimeError if there are too few."""
        is_head = tags[ray_tags.TAG_RAY_NODE_KIND] == ray_tags.NODE_KIND_HEAD
        pool = [self._head] if is_head else self._pools[tags[ray_tags.TAG_RAY_USER_NODE_TYPE]]
        return {host: {} for host in self._book.take(pool, tags, count)}

    def terminate_nodes(self, node_ids: Sequence[str]) -> None:
        if node_ids:
            with ThreadPoolExecutor(len(node_ids), thread_name_prefix="terminate") as pool:
                list(pool.map(self.terminate_node, node_ids))

    def terminate_node(self, node_id: str) -> None:
        """Stop Ray on the host and give it back, even if it can't be reached."""
        runner = self.get_command_runner(
            log_prefix=f"{node_id}: ",
            node_id=node_id,
            auth_config=self.provider_config["auth"],
            cluster_name=self.cluster_name,
            process_runner=subprocess,
            use_internal_ip=True,
        )
        try:
            runner.run(f"ray stop; rm -f ~/{self._file}", timeout=_CONNECT_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError, click.ClickException) as error:
            _log.warning("%s: could not stop Ray: %s", node_id, error)
        self._torn_down.add(node_id)
        self._book.give_back(node_id)


def _check_pools(config: dict[str, Any]) -> None:
    """Raise ValueError if the pools don't match the types of workers, or share a host."""
    provider = config["provider"]
    pools: dict[str, list[str]] = provider["pools"]
    worker_types = {
        name: kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"]
    }
    if set(pools) != set(worker_types):
        raise ValueError(f"provider.pools: has {sorted(pools)}, but the types of workers are {sorted(worker_types)}")
    for name, kind in worker_types.items():
        if kind["max_workers"] > len(pools[name]):
            raise ValueError(f"{name}: max_workers is {kind['max_workers']}, but the pool has {len(pools[name])} hosts")
    hosts = [provider["head_ip"], *(host for pool in pools.values() for host in pool)]
    twice = {host for host in hosts if hosts.count(host) > 1}
    if twice:
        raise ValueError(f"provider.pools: {sorted(twice)} appear more than once")
