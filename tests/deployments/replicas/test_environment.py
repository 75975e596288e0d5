"""Serve's proxy sends everything to one coordinator while another stands by."""

import asyncio
from types import SimpleNamespace
from typing import Any

from deployments.replicas.environment import StandbyRouter


def test_one_replica_serves_for_as_long_as_it_is_there() -> None:
    """Whatever the order and number of the others: requests of one client would else find two queues."""
    router = StandbyRouter.__new__(StandbyRouter)

    def chosen(*names: str) -> str:
        replicas: Any = [SimpleNamespace(replica_id=name) for name in names]
        ((replica,),) = asyncio.run(router.choose_replicas(replicas))
        return str(replica.replica_id)

    listings = [("b",), ("b", "a"), ("a", "b"), ("c", "a"), ("a", "c", "b"), ("a", "b"), ("b",)]
    assert [chosen(*names) for names in listings] == ["b", "b", "b", "a", "a", "a", "b"]
