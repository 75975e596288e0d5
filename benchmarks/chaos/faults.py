"""What goes wrong on purpose: kills, hangs, links that are cut, freeze or lag, drawn at random and done in time."""

import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.chaos.fleet import Fleet, Post

Kind = Literal["kill drafter", "kill target", "kill member", "hang", "cut", "freeze", "delay"]

_HANG_S = (1.0, 3.0, 8.0, 20.0)  # after the last, the process is no longer there to wake up
_LINK_S = (0.3, 2.0, 6.0)
_DELAYS_S = (0.02, 0.1, 0.4)


@dataclass(frozen=True, slots=True)
class Fault:
    """One that happened."""

    kind: Kind
    model: str
    at_s: float  # by the monotonic clock
    lasted_s: float  # 0: a kill


def draw(counts: Mapping[Kind, int], *, seed: int) -> list[Kind]:
    """So many of each kind, in an order drawn by `seed`."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    random.Random(seed).shuffle(kinds)
    return kinds


class Havoc:
    """Does one fault after the other, at times drawn at random."""

    def __init__(self, fleet: Fleet, *, seed: int) -> None:
        self.faults: list[Fault] = []
        self._fleet = fleet
        self._chance = random.Random(seed)
        self._healing: list[threading.Timer] = []

    def wreak(self, kinds: Sequence[Kind], *, interval_s: float, report: Callable[[str], None]) -> None:
        """All of them, `interval_s` apart on average; returns when all that can heal has healed."""
        for number, kind in enumerate(kinds, 1):
            time.sleep(self._chance.uniform(0.5, 1.5) * interval_s)
            fault = self._do(kind)
            self.faults.append(fault)
            report(f"{number}/{len(kinds)} {fault.kind}: {fault.model}, {fault.lasted_s:g} s")
        for timer in self._healing:
            timer.join()

    def _do(self, kind: Kind) -> Fault:
        post = self._victim(kind)
        at_s, lasts_s = time.monotonic(), 0.0
        match kind:
            case "kill drafter" | "kill target" | "kill member":
                post.signal(signal.SIGKILL)
            case "hang":
                lasts_s = self._chance.choice(_HANG_S)
                post.signal(signal.SIGSTOP)
                self._later(lasts_s, lambda: post.signal(signal.SIGCONT))
            case "cut" | "freeze":
                lasts_s = self._chance.choice(_LINK_S)
                relay = post.relay
                relay.set("cut" if kind == "cut" else "frozen")
                self._later(lasts_s, lambda: relay.set("open"))
            case "delay":
                lasts_s = self._chance.choice(_LINK_S)
                relay = post.relay
                relay.set("open", delay_s=self._chance.choice(_DELAYS_S))
                self._later(lasts_s, lambda: relay.set("open"))
        return Fault(kind, post.spec.name, at_s, lasts_s)

    def _victim(self, kind: Kind) -> Post:
        """A post that is manned, with the model that the kind names, or with any."""
        while True:
            posts = [post for post in self._fleet.posts if post.name is not None]
            if kind.startswith("kill "):
                posts = [post for post in posts if post.spec.name == kind.removeprefix("kill ")]
            if posts:
                return self._chance.choice(posts)
            time.sleep(0.05)

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, function)
        timer.daemon = True
        timer.start()
        self._healing.append(timer)
