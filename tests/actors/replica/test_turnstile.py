"""Turns run side by side, and never beside what must be alone."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from actors.replica.in_process import Turnstile


def test_turns_run_side_by_side() -> None:
    turnstile, both = Turnstile(lambda: None), threading.Barrier(2, timeout=30)

    def turn() -> None:
        with turnstile.turn():
            both.wait()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(turn), pool.submit(turn)]:
            done.result()


def test_nothing_runs_beside_what_is_alone() -> None:
    wakes: list[int] = []
    turnstile = Turnstile(lambda: wakes.append(1))
    inside: list[str] = []
    problems: list[list[str]] = []

    def work(name: str, is_alone: bool) -> None:
        inside.append(name)
        if is_alone and len(inside) > 1:
            problems.append(inside.copy())
        inside.remove(name)

    def turns(name: str, enter: Callable[[], None]) -> None:
        for _ in range(200):
            enter()

    def plain(name: str) -> None:
        with turnstile.turn():
            work(name, False)

    def loading(name: str) -> None:
        with turnstile.turn():
            work(name, False)
            with turnstile.alone_in_turn():
                work(name, True)
            work(name, False)

    def outside(name: str) -> None:
        with turnstile.alone():
            work(name, True)

    kinds = {"a": plain, "b": plain, "c": loading, "d": loading, "e": outside}
    with ThreadPoolExecutor(len(kinds)) as pool:
        running = [pool.submit(turns, name, lambda name=name: kinds[name](name)) for name in kinds]  # type: ignore[misc]
        for done in running:
            done.result(timeout=60)
    assert not problems
    assert len(wakes) == 600
