"""What a run under faults found: requests that were lost or differed, and the pauses of their streams."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from evaluation.metrics import table
from tests.chaos.load import Case, R, Transcript


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault or update. Times are on the monotonic clock."""

    kind: str
    label: str  # of its pauses
    at_s: float
    lasted_s: float = 0.0  # 0: a kill or an update
    back_s: float = 0.0  # seconds until all replicas were ready again, where that was waited for


@dataclass(frozen=True, slots=True)
class Pauses:
    """Statistics of the times in which streams delivered nothing, in seconds."""

    times: int
    median_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a run."""

    requests: int
    faults: dict[str, int]  # numbers by kind
    lost: list[str]
    differing: list[str]
    stalls: dict[str, Pauses]  # longest pauses of requests, by kind of request
    pauses: dict[str, Pauses]  # longest pauses after faults, by label

    @property
    def wrong(self) -> bool:
        return bool(self.lost or self.differing)


def judge(
    answers: Sequence[tuple[Case[R], Transcript]],
    undisturbed: Mapping[int, Transcript],
    faults: Sequence[Fault],
    *,
    alone_s: float = 0.0,
) -> Findings:
    """Compare every answer with the undisturbed one of its case, and measure the pauses after each fault.

    alone_s: a fault's pauses count if no other one acted for this time before it.
    """
    lost, differing = [], []
    stalls: dict[str, list[float]] = {}
    for case, answer in answers:
        expected = undisturbed[case.number]
        if answer.error is not None or answer.finish is None:
            since = _since(answer, faults)
            lost.append(f"{case.kind}{since}: {answer.error}")
        elif not answer.same_as(expected):
            differing.append(f"{case.kind}: {dict(answer.texts)} instead of {dict(expected.texts)}")
        longest_s = max((gap.ended_s - gap.began_s for gap in answer.gaps), default=0.0)
        stalls.setdefault(case.kind, []).append(longest_s)
    pauses = _pauses([answer for _, answer in answers], faults, alone_s)
    counts = dict(Counter(fault.kind for fault in faults))
    return Findings(len(answers), counts, lost, differing, _summarize(stalls), _summarize(pauses))


def _since(answer: Transcript, faults: Sequence[Fault]) -> str:
    """Describe when a request began, relative to the last fault before it; without one, to the first fault."""
    before = [fault for fault in faults if fault.at_s < answer.began_s] or faults[:1]
    return f", begun {answer.began_s - before[-1].at_s:+.1f} s after {before[-1].kind}" if before else ""


def _pauses(answers: Sequence[Transcript], faults: Sequence[Fault], alone_s: float) -> dict[str, list[float]]:
    """Return the longest pauses after faults, by label."""
    pauses: dict[str, list[float]] = {}
    gaps = [gap for answer in answers for gap in answer.gaps]
    for index, fault in enumerate(faults):
        before_s = max((other.at_s + other.lasted_s for other in faults[:index]), default=0.0)
        next_s = min((other.at_s for other in faults[index + 1 :]), default=float("inf"))
        if fault.at_s - before_s >= alone_s:
            ends_s = [gap.ended_s for gap in gaps if gap.contains(fault.at_s) and gap.ended_s < next_s]
            pauses.setdefault(fault.label, []).append(max(ends_s, default=fault.at_s) - fault.at_s)
    return pauses


def _summarize(seconds: Mapping[str, Sequence[float]]) -> dict[str, Pauses]:
    return {
        label: Pauses(len(each), round(median(each), 2), round(max(each), 2)) for label, each in sorted(seconds.items())
    }


def as_text(findings: Findings) -> str:
    """Format the counts and the pauses."""
    faults = ", ".join(f"{count} × {kind}" for kind, count in sorted(findings.faults.items()))
    lines = [
        f"requests   {findings.requests}",
        f"faults     {sum(findings.faults.values())}: {faults}",
        f"lost       {len(findings.lost)}",
        f"differing  {len(findings.differing)}",
        *findings.lost,
        *findings.differing,
    ]
    titles = {"longest pause of a request, s": findings.stalls, "longest pause after a fault, s": findings.pauses}
    tables = []
    for title, pauses in titles.items():
        rows = [[label, str(p.times), f"{p.median_s:.1f}", f"{p.most_s:.1f}"] for label, p in pauses.items()]
        if rows:
            tables.append(table([title, "times", "median", "most"], rows))
    return "\n\n".join(["\n".join(lines), *tables])
