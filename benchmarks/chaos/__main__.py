"""`make chaos`: kills, stops and disconnects replicas under load, and checks that every answer stays the same.

Without Ray, because processes that only load a small model restart within two seconds: see docs/failures.md. Wrong
answers are printed, and the exit status is 1 if there are any.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click

from actors.replica import in_process
from benchmarks.chaos.faults import Fault, FaultInjector, Kind, draw
from benchmarks.chaos.fleet import Fleet, running_fleet
from benchmarks.chaos.load import Case, Streams, Transcript, collect, make_cases
from benchmarks.report import table, write
from engine.loading.checkpoint import ModelSpec

_ALONE_S = 8.0  # a pause is attributed to a fault if no other fault acted for this time before it
option = partial(click.option, show_default=True)


@click.command()
@option("--drafter-kills", default=100)
@option("--target-kills", default=27)
@option("--member-kills", default=8, help="Kills of replicas that are ensemble members, but not the leader.")
@option("--hangs", default=12, help="SIGSTOP of any replica for 1 to 20 s.")
@option("--cuts", default=8, help="Broken connections, for 0.3 to 6 s.")
@option("--freezes", default=8, help="Connections that stay open but carry nothing, for 0.3 to 6 s.")
@option("--delays", default=8, help="Additional latency of 20 to 400 ms, for 0.3 to 6 s.")
@option("--interval", "interval_s", default=1.0, help="Seconds between faults, on average.")
@option("--targets", default=2)
@option("--drafters", default=3)
@option("--members", default=2)
@option("--streams", default=8)
@option("--cases", "case_count", default=60, help="Different requests.")
@option("--new-tokens", default=48, help="Tokens of the shortest answers; others have two or four times as many.")
@option("--seed", default=0)
@option("--output", type=click.Path(path_type=Path), default=Path(".bench/chaos.json"))
def main(
    interval_s: float, streams: int, case_count: int, new_tokens: int, seed: int, output: Path, **given: Any
) -> None:
    """Send requests, inject faults, compare answers, print, and write JSON."""
    cases = make_cases(Path("models/target"), case_count, new_tokens, seed=seed)
    counts: dict[Kind, int] = {
        "kill drafter": given["drafter_kills"],
        "kill target": given["target_kills"],
        "kill member": given["member_kills"],
        "hang": given["hangs"],
        "cut": given["cuts"],
        "freeze": given["freezes"],
        "delay": given["delays"],
    }
    models = {
        "target": ("target", _spec("target"), given["targets"]),
        "drafter": ("drafter", _spec("drafter"), given["drafters"]),
        "member": ("target", _spec("member"), given["members"]),
    }
    with running_fleet({name: model for name, model in models.items() if model[2]}) as fleet:  # type: ignore[misc]
        ask = partial(_ask, fleet)
        undisturbed = _undisturbed(ask, cases, streams)
        click.echo(f"{len(undisturbed)} different requests answered without faults")
        running = Streams(ask, [case for case in cases if case.request.request_id in undisturbed], streams, seed=seed)
        running.start()
        injector = FaultInjector(fleet, seed=seed)
        injector.run(draw(counts, seed=seed), interval_s=interval_s, report=click.echo)
        answers = running.finish()
        fleet.check()
    findings = judge(answers, undisturbed, injector.faults)
    click.echo("\n" + as_text(findings))
    settings = given | {"interval_s": interval_s, "streams": streams, "cases": case_count, "seed": seed}
    write(output, "benchmarks.chaos", settings, **asdict(findings))
    sys.exit(bool(findings.lost or findings.differing))


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a run."""

    requests: int
    faults: dict[str, int]  # numbers by kind
    lost: list[str]
    differing: list[str]
    stalls: dict[str, "Pauses"]  # longest pauses of requests, by kind of request
    pauses: dict[str, "Pauses"]  # longest pauses after faults, by kind of fault


@dataclass(frozen=True, slots=True)
class Pauses:
    """Statistics of the times in which streams delivered nothing, in seconds."""

    times: int
    median_s: float
    most_s: float

    @classmethod
    def summarize(cls, seconds: Sequence[float]) -> "Pauses":
        return cls(len(seconds), round(median(seconds), 2), round(max(seconds), 2))


def _spec(name: str) -> ModelSpec:
    return ModelSpec(name=name, path=f"models/{name}", dtype="float32", device="cpu", slots=8, threads=1)


def _ask(fleet: Fleet, case: Case) -> Transcript:
    return collect(in_process.stream(fleet.coordinator, case.fresh(), fleet.check))


def _undisturbed(ask: Callable[[Case], Transcript], cases: Sequence[Case], streams: int) -> dict[int, Transcript]:
    """Return the answers without faults, by id of the case. Leaves out cases whose two answers differ by rounding."""
    answers: dict[int, Transcript] = {}
    unsteady: set[int] = set()
    for seed in range(2):
        calm = Streams(ask, cases, streams, seed=seed)
        calm.start(rounds=1)
        for case, answer in calm.finish():
            if answer.error is not None:
                raise click.ClickException(f"{case.kind}: {answer.error}")
            if not answer.same_as(answers.setdefault(case.request.request_id, answer)):
                click.echo(f"{case.kind}: has two answers even without faults, and is left out")
                unsteady.add(case.request.request_id)
    return {request_id: answer for request_id, answer in answers.items() if request_id not in unsteady}


def judge(
    answers: Sequence[tuple[Case, Transcript]], undisturbed: dict[int, Transcript], faults: Sequence[Fault]
) -> Findings:
    """Compare every answer with the undisturbed one, and measure the pauses after each fault."""
    lost, differing = [], []
    for case, answer in answers:
        expected = undisturbed[case.request.request_id]
        if answer.error is not None or answer.finish is None:
            lost.append(f"{case.kind}: {answer.error}")
        elif not answer.same_as(expected):
            differing.append(f"{case.kind}: {answer.text!r} instead of {expected.text!r}")
    return Findings(
        requests=len(answers),
        faults=dict(Counter(fault.kind for fault in faults)),
        lost=lost,
        differing=differing,
        stalls=_stalls(answers),
        pauses=_pauses([answer for _, answer in answers], faults),
    )


def _stalls(answers: Sequence[tuple[Case, Transcript]]) -> dict[str, Pauses]:
    stalls: dict[str, list[float]] = {}
    for case, answer in answers:
        longest_s = max((gap.ended_s - gap.began_s for gap in answer.gaps), default=0.0)
        stalls.setdefault(case.kind, []).append(longest_s)
    return {kind: Pauses.summarize(seconds) for kind, seconds in stalls.items()}


def _pauses(answers: Sequence[Transcript], faults: Sequence[Fault]) -> dict[str, Pauses]:
    """Return the longest pauses after faults that no other fault overlapped, by kind."""
    pauses: dict[str, list[float]] = {}
    gaps = [gap for answer in answers for gap in answer.gaps]
    for index, fault in enumerate(faults):
        before = max((other.at_s + other.lasted_s for other in faults[:index]), default=0.0)
        after = min((other.at_s for other in faults[index + 1 :]), default=float("inf"))
        if fault.at_s - before < _ALONE_S:
            continue
        after_fault = [gap for gap in gaps if gap.began_s - 0.5 < fault.at_s < gap.ended_s < after]
        label = (
            f"{fault.kind} of a {fault.model}, {fault.lasted_s:g} s" if fault.lasted_s else f"kill of a {fault.model}"
        )
        pauses.setdefault(label, []).append(max((gap.ended_s - fault.at_s for gap in after_fault), default=0.0))
    return {label: Pauses.summarize(seconds) for label, seconds in sorted(pauses.items())}


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
    tables = [table([title, "times", "median", "most"], _rows(pauses)) for title, pauses in titles.items()]
    return "\n\n".join(["\n".join(lines), *filter(None, tables)])


def _rows(pauses: dict[str, Pauses]) -> list[list[str]]:
    return [
        [label, str(summary.times), f"{summary.median_s:.1f}", f"{summary.most_s:.1f}"]
        for label, summary in pauses.items()
    ]


if __name__ == "__main__":
    main()
