"""Injected faults: kills, hangs, and links that are cut, frozen or delayed, at random times."""

import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, get_args

from tests.chaos.findings import Fault
from tests.chaos.fleet import Fleet, SupervisedReplica
from tests.chaos.proxy import State

Kind = Literal["kill drafter", "kill target", "kill member", "hang", "cut", "freeze", "delay"]

_HANG_S = (1.0, 3.0, 8.0, 20.0)  # the supervisor replaces a process before the longest one ends
_LINK_S = (0.3, 2.0, 6.0)
_DELAYS_S = (0.02, 0.1, 0.4)
_STATES: Mapping[Kind, State] = {"cut": "cut", "freeze": "frozen", "delay": "open"}


def draw(counts: Mapping[Kind, int], *, seed: int) -> list[Kind]:
    """Return `counts` faults of each kind in random order."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    random.Random(seed).shuffle(kinds)
    return kinds


class FaultInjector:
    """Injects one fault after the other at random times."""

    KINDS: ClassVar[tuple[Kind, ...]] = get_args(Kind)

    def __init__(self, fleet: Fleet, *, seed: int) -> None:
        self.faults: list[Fault] = []
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._healing: list[threading.Timer] = []

    def run(self, kinds: Sequence[Kind], *, interval_s: float, report: Callable[[str], None]) -> None:
        """Inject all faults, every `interval_s` seconds on average. Returns when all temporary faults have ended."""
        for number, kind in enumerate(kinds, 1):
            time.sleep(self._rng.uniform(0.5, 1.5) * interval_s)
            fault = self._inject(kind)
            self.faults.append(fault)
            report(f"{number}/{len(kinds)} {fault.label}")
        for timer in self._healing:
            timer.join()

    def _inject(self, kind: Kind) -> Fault:
        replica = self._choose(kind)
        at_s, lasts_s = time.monotonic(), 0.0
        match kind:
            case "kill drafter" | "kill target" | "kill member":
                replica.signal(signal.SIGKILL)
            case "hang":
                lasts_s = self._rng.choice(_HANG_S)
                replica.signal(signal.SIGSTOP)
                self._later(lasts_s, lambda: replica.signal(signal.SIGCONT))
            case "cut" | "freeze" | "delay":
                lasts_s = self._rng.choice(_LINK_S)
                relay, delay_s = replica.relay, self._rng.choice(_DELAYS_S) if kind == "delay" else 0.0
                relay.set(_STATES[kind], delay_s=delay_s)
                self._later(lasts_s, lambda: relay.set("open"))
        model = replica.spec.name
        label = f"{kind} of a {model}, {lasts_s:g} s" if lasts_s else f"kill of a {model}"
        return Fault(kind, label, at_s, lasts_s)

    def _choose(self, kind: Kind) -> SupervisedReplica:
        """Choose a ready replica, of the model that the kind names if it names one. Waits until there is one."""
        while True:
            replicas = [replica for replica in self._fleet.replicas if replica.name is not None]
            if kind.startswith("kill "):
                replicas = [replica for replica in replicas if replica.spec.name == kind.removeprefix("kill ")]
            if replicas:
                return self._rng.choice(replicas)
            time.sleep(0.05)

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, function)
        timer.daemon = True
        timer.start()
        self._healing.append(timer)
