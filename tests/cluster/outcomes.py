"""What became of a client's requests, and what must hold of it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from tests.cluster.ask import CASES
from tests.cluster.cluster_operator import Operator


def check(outcomes: list[dict[str, Any]], right: list[list[str]] | None = None) -> list[list[str]]:
    """The texts of a client's requests, none of which was lost, and all of which are right."""
    errors = [error for outcome in outcomes for error in outcome["errors"]]
    assert errors == [], errors
    texts: list[list[str]] = [outcome["texts"] for outcome in outcomes]
    assert all(len(different) == 1 for different in texts), texts
    assert right is None or texts == right
    answers = sum(outcome["answers"] for outcome in outcomes)
    slowest_s = max(outcome["slowest_s"] for outcome in outcomes)
    pause_s = max(outcome["pause_s"] for outcome in outcomes)
    print(
        f"{answers} answers, none lost, none that differs; the slowest took {slowest_s:.1f} s, a pause {pause_s:.1f} s"
    )
    return texts


def ask_while(operator: Operator, strike: Callable[[], object]) -> list[dict[str, Any]]:
    """What a client's requests come to if something is struck in the middle of its streams."""
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(operator.ask, 20)
        operator.wait(lambda: operator.streams() == CASES, "all streams are open")
        strike()
        return asked.result()


def ask_until(operator: Operator, settle: Callable[[], object]) -> list[list[dict[str, Any]]]:
    """What the requests of one client after another come to, until the cluster has settled."""
    settled = Event()

    def rounds() -> list[list[dict[str, Any]]]:
        outcomes = [operator.ask(30)]
        while not settled.is_set():
            outcomes.append(operator.ask(30))
        return outcomes

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(rounds)
        try:
            settle()
        finally:
            settled.set()
        return asked.result()
