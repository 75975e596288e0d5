"""An engine whose loops take turns in one thread, so that what it does is counted in turns instead of seconds."""

import random
from collections.abc import Iterable, Mapping, Sequence

from actors.coordinator.request import Delta, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.wire.link import Envelope, LocalLink
from actors.wire.messages import Message
from engine.model.runner import Runner


class _PromptLink(LocalLink):
    """Waits for nothing."""

    def __init__(self, link: LocalLink) -> None:
        self.name, self._link = link.name, link

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        self._link.send(peer, messages)

    def receive(self, timeout_s: float) -> list[Envelope]:
        return self._link.receive(0.0)

    def reaches(self, peer: str) -> bool:
        return self._link.reaches(peer)

    def wake(self) -> None:
        self._link.wake()

    def close(self) -> None:
        self._link.close()


class Turns:
    """Turns of a coordinator and its replicas: all in order, or at random."""

    def __init__(
        self,
        runners: Mapping[str, Runner],
        options: LoopOptions = LoopOptions(prefill_chunk=64, adaptive=False),
        *,
        seed: int | None = None,
    ) -> None:
        """runners: by the names of targets, and "drafter". seed: None takes turns in order."""
        roles: dict[str, Role] = {name: "drafter" if name == "drafter" else "target" for name in runners}
        replicas = {name: (roles[name], runner) for name, runner in runners.items()}
        self._links: dict[str, LocalLink] = {}
        self.engine = Engine(replicas, options, wrap_link=self._wrap)
        self._random = None if seed is None else random.Random(seed)
        self._loops = {"coordinator": self.engine.coordinator, **self.engine.loops}
        self.running = list(self._loops)  # the others are stopped

    def _wrap(self, link: LocalLink) -> LocalLink:
        self._links[link.name] = prompt = _PromptLink(link)
        return prompt

    def begin(self, request: Request) -> list[Delta]:
        """Submit a request. Returns the list to which its deltas are appended."""
        deltas: list[Delta] = []
        self.engine.coordinator.submit(request, deltas.append)
        return deltas

    def kill(self, name: str) -> None:
        """End the coordinator or a replica. Its connections break."""
        self.running.remove(name)
        self._links[name].close()

    def take(self, count: int = 1) -> None:
        """Let each loop take so many turns, in the mean."""
        loops = [self._loops[name] for name in self.running]
        for _ in range(count):
            for loop in loops if self._random is None else self._random.choices(loops, k=len(loops)):
                loop.turn()

    def finish(self, answers: Iterable[Sequence[Delta]], *, at_most: int) -> int:
        """Take turns until all answers have ended, and return how many."""
        unfinished = list(answers)
        for count in range(at_most):
            unfinished = [deltas for deltas in unfinished if not deltas or not has_ended(deltas[-1])]
            if not unfinished:
                return count
            self.take()
        raise AssertionError(f"{len(unfinished)} requests have not ended after {at_most} turns")


def has_ended(delta: Delta) -> bool:
    """Whether a delta is its request's last one."""
    return delta.finish is not None or delta.error is not None
