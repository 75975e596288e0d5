"""Real clusters on several machines, from `ray up` to `ray down`: `make test-cluster`. Machines are namespaces here."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.ask import CASES
from tests.cluster.cluster_operator import Operator
from tests.cluster.fleet import SERVERS, Fleet
from tests.cluster.outcomes import ask_until, ask_while, check

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def counts(operator: Operator) -> dict[str, int]:
    """How many machines run each role, each on its own kind of machine."""
    hosts = operator.roles()
    for name, roles in hosts.items():
        assert roles == [name.rstrip("12").replace("head", "coordinator")]
    return {kind: sum(roles == [kind] for roles in hosts.values()) for kind in ("target", "drafter")}


def settle(operator: Operator, what: str, **wanted: int) -> None:
    """Wait for that many machines of each role."""
    operator.wait(lambda: counts(operator) == wanted, what, timeout_s=300)


def test_pools_scale_apart_and_a_lost_drafter_costs_no_request(machines: Fleet) -> None:
    operator = Operator(machines, "cluster-pools.yaml", idle_timeout_minutes=0.3)
    operator.up()
    operator.wait(lambda: set(operator.nodes()) == {"head", "target1"}, "the head and one target, none being asked for")

    operator.deploy(target=1, drafter=1)
    operator.wait(operator.ready, "both models are served")
    assert operator.roles() == {"head": ["coordinator"], "target1": ["target"], "drafter1": ["drafter"]}
    undisturbed = operator.ask(1)
    right = check(undisturbed)
    assert any(outcome["drafted"] > 0 for outcome in undisturbed)

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(operator.ask, 45)
        operator.deploy(target=2, drafter=2)
        settle(operator, "two of each, on machines of their own", target=2, drafter=2)
        operator.deploy(target=1, drafter=1)
        settle(operator, "one of each again", target=1, drafter=1)
        check(asked.result(), right)
    operator.wait(lambda: len(operator.nodes()) == 3, "idle machines leave")

    (drafter,) = (name for name, roles in operator.roles().items() if roles == ["drafter"])
    (other,) = {"drafter1", "drafter2"} - {drafter}
    check(ask_while(operator, lambda: machines.power_off(drafter)), right)
    operator.wait(lambda: operator.roles().get(other) == ["drafter"], "a drafter on the other machine", timeout_s=180)
    operator.wait(operator.ready, "both models are served")
    assert any(outcome["drafted"] > 0 for outcome in operator.ask(1))

    operator.down()
    assert [name for name in SERVERS if name != drafter and machines.processes(name, "raylet/raylet")] == []


def test_load_decides_how_many_of_each(machines: Fleet) -> None:
    """Eight streams are more than the slots of one target or one drafter hold."""
    operator = Operator(machines, "cluster-pools.yaml", idle_timeout_minutes=0.3)
    delays = {"max": 2, "up_delay_s": 1, "down_delay_s": 15}
    operator.configure(
        target={"slots": 2, "threads": 1, "scaling": {"min": 1, **delays}},
        drafter={"slots": 4, "scaling": {"min": 0, **delays}},
    )
    operator.up()
    operator.deploy()
    operator.wait(lambda: operator.models() == {"target"}, "the target is served")
    right = check(operator.ask(1))
    settle(operator, "no drafter without requests", target=1, drafter=0)
    operator.wait(lambda: len(operator.nodes()) == 2, "idle machines leave")

    rounds = ask_until(operator, lambda: settle(operator, "two of each under load", target=2, drafter=2))
    for outcomes in rounds:
        check(outcomes, right)
    assert sum(outcome["drafted"] for outcomes in rounds for outcome in outcomes) > 0
    settle(operator, "no drafter and one target without load", target=1, drafter=0)
    operator.wait(lambda: len(operator.nodes()) == 2, "idle machines leave")

    def take_drafters_away() -> None:
        operator.wait(lambda: counts(operator)["drafter"] > 0, "a drafter under load", timeout_s=300)
        operator.scale("drafter", 0)
        settle(operator, "no drafter, by hand; targets go on to follow the load", target=2, drafter=0)

    for outcomes in ask_until(operator, take_drafters_away):
        check(outcomes, right)
    assert counts(operator)["drafter"] == 0
    operator.scale("drafter", 1)
    operator.wait(operator.ready, "a drafter, by hand")
    operator.down()


def test_fixed_hosts_all_join_and_a_lost_target_only_delays(machines: Fleet) -> None:
    operator = Operator(machines, "cluster-local.yaml")
    operator.up()
    operator.wait(lambda: set(operator.nodes()) == set(SERVERS), "all machines have joined")
    for name, resources in operator.nodes().items():
        assert {kind for kind in ("target", "drafter") if kind in resources} == {name.rstrip("12")} - {"head"}

    operator.deploy(target=2, drafter=2)
    operator.wait(operator.ready, "both models are served")
    settle(operator, "two of each, on machines of their own", target=2, drafter=2)
    right = check(operator.ask(5))
    check(ask_while(operator, lambda: machines.power_off("target1")), right)

    coordinator = "$(pgrep -f '[S]erveReplica:consort:Coordinator')"
    struck = ask_while(operator, lambda: machines.run("head", f"kill -KILL {coordinator}"))
    assert all("the coordinator that answered has died" in error for outcome in struck for error in outcome["errors"])
    assert sum(len(outcome["errors"]) for outcome in struck) == CASES
    operator.wait(operator.ready, "another coordinator serves")
    check(operator.ask(1), right)

    operator.down()
    assert machines.processes("head", "raylet/raylet") == 0
