"""A check: a promise, and how to see whether a server keeps it. What differs is shrunk before it is shown."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import httpx

from decoding.errors import ConsortError, InvalidRequestError, OverloadedError
from evaluation.audit.server import Body, Server

Verdict = Literal["kept", "differs", "not offered"]

_LOOKS = 16  # the most that shrinking takes
_AGAIN = 2  # looks before a difference counts as not repeatable


class NotOfferedError(Exception):
    """The server lacks what a check needs."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Requests whose answers are looked at, and those that only keep the server busy meanwhile."""

    bodies: tuple[Body, ...]
    neighbours: tuple[Body, ...] = ()

    def smaller(self) -> Iterator["Probe"]:
        """Yield probes with fewer neighbours, fewer requests, or fewer tokens."""
        for some in _halves(self.neighbours):
            yield replace(self, neighbours=some)
        for some in _halves(self.bodies):
            yield replace(self, bodies=some)
        longest = max((body.get("max_tokens", 1) for body in self.bodies), default=1)
        for fewer in {longest // 2, longest * 3 // 4, longest - 1} - {0, longest}:
            bodies = tuple(body | {"max_tokens": min(fewer, body["max_tokens"])} for body in self.bodies)
            yield replace(self, bodies=bodies)


@dataclass(frozen=True, slots=True)
class Difference:
    """What was promised, what came, and the requests that show it, the last of them beside neighbours."""

    expected: str
    actual: str
    requests: Sequence[Body | str]
    neighbours: Sequence[Body] = ()
    abandoned: bool = False  # the neighbours hang up


Look = Callable[[Server, Probe], Iterator[Difference]]


@dataclass(frozen=True, slots=True)
class Check:
    """A promise. `look` yields a difference for each answer that breaks it; raises NotOfferedError too."""

    name: str
    look: Look  # its docstring says what is promised
    probes: Callable[["Sample"], Sequence[Probe]]

    @property
    def promise(self) -> str:
        return self.look.__doc__ or ""


@dataclass(frozen=True, slots=True)
class Sample:
    """The requests that checks send."""

    greedy: tuple[Body, ...]
    sampled: tuple[Body, ...]
    structured: tuple[Body, ...]  # conversations, where the server has them
    crowd: tuple[Body, ...]

    @property
    def all(self) -> tuple[Body, ...]:
        return self.greedy + self.sampled


@dataclass(frozen=True, slots=True)
class Result:
    """A check's verdict."""

    check: Check
    verdict: Verdict
    tokens: int = 0  # of all answers
    requests: int = 0  # whose answers were looked at
    differing: int = 0  # of them
    difference: Difference | None = None  # the first, by the smallest requests that show it
    repeatable: bool = False
    reasons: Sequence[str] = field(default_factory=list)  # why something was not offered


def run(check: Check, server: Server, sample: Sample) -> Result:
    """Look at all probes of a check, and shrink the first that shows a difference."""
    probes, before = check.probes(sample), server.tokens
    reasons: list[str] = []
    seen: list[tuple[Probe, Difference]] = []
    requests = 0
    for probe in probes:
        try:
            seen += [(probe, difference) for difference in _looked(check, server, probe)]
            requests += len(probe.bodies)
        except (NotOfferedError, InvalidRequestError, OverloadedError) as error:
            reasons.append(str(error))
    tokens = server.tokens - before
    if not seen:
        return Result(check, "kept" if requests else "not offered", tokens, requests, reasons=reasons)
    difference, repeatable = _shrunk(check, server, *seen[0])
    return Result(check, "differs", tokens, requests, len(seen), difference, repeatable, reasons)


def _looked(check: Check, server: Server, probe: Probe) -> Iterator[Difference]:
    """Look; an answer that breaks off is a difference too."""
    try:
        yield from check.look(server, probe)
    except (InvalidRequestError, OverloadedError):
        raise
    except (ConsortError, ValueError, KeyError, TypeError) as error:  # these come from answers of another form
        if isinstance(error.__cause__, httpx.ConnectError):
            raise  # there is no server any more
        yield Difference(
            "an answer in OpenAI's form", f"{type(error).__name__}: {error}", probe.bodies, probe.neighbours
        )


def _shrunk(check: Check, server: Server, probe: Probe, difference: Difference) -> tuple[Difference, bool]:
    """Return what a probe that is as small as possible shows, and whether looking again shows it at all."""
    server.forget()  # it may be the reference that is wrong
    looks = iter(range(_LOOKS))

    def again(smaller: Probe) -> Difference | None:
        try:
            return next(_looked(check, server, smaller), None)
        except (NotOfferedError, InvalidRequestError, OverloadedError):
            return None

    shown = next(filter(None, (again(probe) for _ in islice(looks, _AGAIN))), None)
    if shown is None:
        return difference, False
    while True:
        for smaller, _ in zip(probe.smaller(), looks, strict=False):
            if (still := again(smaller)) is not None:
                probe, shown = smaller, still
                break
        else:
            return shown, True


def _halves(bodies: tuple[Body, ...]) -> list[tuple[Body, ...]]:
    middle = len(bodies) // 2
    return [bodies[:middle], bodies[middle:]] if middle else []
