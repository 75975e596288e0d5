"""A head with its memory in Redis, killed under load and started again: `make test-cluster`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster import restart_gcs
from tests.cluster.ask import CASES
from tests.cluster.cluster_operator import Operator
from tests.cluster.documented import with_redis
from tests.cluster.fleet import ADDRESSES, SERVERS, Fleet
from tests.cluster.outcomes import check

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/usr/bin/redis-server").exists(), reason="apt-get install redis-server"),
]
PASSWORD = "fedcba9876543210" * 4
REDIS = f"""
bind {ADDRESSES["redis"]}
requirepass {PASSWORD}
appendonly yes
maxmemory-policy noeviction
dir /tmp
daemonize yes
"""


@pytest.fixture
def operator(machines: Fleet) -> Operator:
    """A cluster that serves from two targets and a drafter, with HTTP and the coordinator on the host drafter2."""
    machines.run("redis", "redis-server -", stdin=REDIS)
    machines.write("laptop", "~/.consort/redis-password", PASSWORD)
    operator = Operator(machines, "cluster-local.yaml", patch=with_redis, http="drafter2")
    operator.up()
    operator.wait(lambda: set(operator.nodes()) == set(SERVERS), "all machines have joined")
    operator.deploy(target=2, drafter=1)
    operator.wait(operator.ready, "both models are served")
    return operator


def roles(operator: Operator) -> dict[str, list[str]]:
    """What runs where, but for the head."""
    return {name: roles for name, roles in operator.roles().items() if name != "head"}


def target_of(machines: Fleet, machine: str) -> str:
    """The process of a machine's target; empty if there is none."""
    return machines.run(machine, "pgrep -f '[S]erveReplica:consort:Target' || true").strip()


def kill_target(machines: Fleet, machine: str) -> Callable[[], bool]:
    """Kill a machine's target. Returns what tells whether there is another in its place."""
    killed = target_of(machines, machine)
    machines.run(machine, f"kill -KILL {killed}")
    return lambda: target_of(machines, machine) not in ("", killed)


@pytest.mark.parametrize("silently", [False, True])
def test_everything_serves_on_while_the_head_is_dead(machines: Fleet, operator: Operator, silently: bool) -> None:
    where = {"target1": ["target"], "target2": ["target"], "drafter1": ["drafter"], "drafter2": ["coordinator"]}
    assert roles(operator) == where
    right = check(operator.ask(1))

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(operator.ask, 120)
        operator.wait(lambda: operator.streams() == CASES, "all streams are open")
        machines.crash("head", silently=silently)
        check(operator.ask(5), right)  # begun while there is no head
        operator.scale("drafter", 2, status=503)
        replaced = kill_target(machines, "target1")
        check(operator.ask(5), right)
        assert not replaced()
        machines.reconnect("head")
        assert machines.processes("head", "raylet/raylet") == 0
        operator.up()
        operator.wait(lambda: set(operator.nodes()) == set(SERVERS), "all machines are in the cluster again")
        operator.wait(replaced, "a target in place of the dead one")
        check(asked.result(), right)

    operator.wait(kill_target(machines, "target2"), "a target in place of another that was killed")
    operator.scale("drafter", 0)
    operator.wait(lambda: operator.models() == {"target"}, "no drafter")
    operator.scale("drafter", 1)
    operator.wait(operator.ready, "a drafter")
    assert any(outcome["drafted"] > 0 for outcome in operator.ask(1))
    operator.down()


def test_gcs_alone_may_die(machines: Fleet, operator: Operator) -> None:
    where = roles(operator)
    right = check(operator.ask(1))
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(operator.ask, 60)
        operator.wait(lambda: operator.streams() == CASES, "all streams are open")
        script = Path(restart_gcs.__file__).read_text(encoding="utf-8")
        again = pool.submit(machines.run, "head", "python - $(pgrep -x gcs_server) 25", stdin=script)
        operator.wait(lambda: machines.processes("head", "gcs/gcs_server") == 0, "no GCS")
        check(operator.ask(3), right)
        again.result()
        operator.wait(lambda: set(operator.nodes()) == set(SERVERS), "all machines are in the cluster")
        check(asked.result(), right)
    assert roles(operator) == where
    operator.wait(kill_target(machines, "target1"), "a target in place of one that was killed")
    operator.scale("drafter", 0)
    operator.wait(lambda: operator.models() == {"target"}, "no drafter")
    operator.down()
