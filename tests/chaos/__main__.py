"""`python -m tests.chaos fleet|serve|soak`: faults under load, and load without an end. See docs/failures.md.

`fleet` (`make chaos`) works without Ray, because processes that only load a small model restart within two seconds.
`serve` (`make chaos-serve`) does the same over HTTP on Ray Serve. `soak` (`make soak`) has no faults: nothing may leak.
Wrong answers are printed, and the exit status is 1 if there are any.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from actors.coordinator.request import Request
from actors.replica import in_process
from actors.replica.roles import Role
from benchmarks.report import write
from engine.loading.checkpoint import ModelSpec
from tests.chaos.cases import collect, fresh, make_cases
from tests.chaos.faults import FaultInjector, Kind, draw
from tests.chaos.findings import as_text, judge
from tests.chaos.fleet import running_fleet
from tests.chaos.load import Ask, Case, Streams, Transcript
from tests.chaos.serve import serve
from tests.chaos.soak import soak

_ALONE_S = 8.0  # a pause is attributed to a fault if no other fault acted for this time before it
option = partial(click.option, show_default=True)


@click.group(help=__doc__)
def main() -> None:
    """Run one of the programs."""


main.add_command(serve)
main.add_command(soak)


@main.command()
@option("--drafter-kills", "kill_drafter", default=100)
@option("--target-kills", "kill_target", default=27)
@option("--member-kills", "kill_member", default=8, help="Of replicas that are ensemble members, but not the leader.")
@option("--hangs", "hang", default=12, help="SIGSTOP of any replica for 1 to 20 s.")
@option("--cuts", "cut", default=8, help="Broken connections, for 0.3 to 6 s.")
@option("--freezes", "freeze", default=8, help="Connections that stay open but carry nothing, for 0.3 to 6 s.")
@option("--delays", "delay", default=8, help="Additional latency of 20 to 400 ms, for 0.3 to 6 s.")
@option("--interval", "interval_s", default=1.0, help="Seconds between faults, on average.")
@option("--targets", default=2)
@option("--drafters", default=3)
@option("--members", default=2)
@option("--streams", default=8)
@option("--cases", "case_count", default=60, help="Different requests.")
@option("--new-tokens", default=48, help="Tokens of the shortest answers; others have two or four times as many.")
@option("--seed", default=0)
@option("--output", type=click.Path(path_type=Path), default=Path(".bench/chaos.json"))
def fleet(interval_s: float, streams: int, seed: int, output: Path, **given: Any) -> None:
    """Send requests, inject faults, compare answers, print, and write JSON."""
    cases = make_cases(Path("models/target"), given["case_count"], given["new_tokens"], seed=seed)
    counts: dict[Kind, int] = {kind: given[kind.replace(" ", "_")] for kind in FaultInjector.KINDS}
    roles: dict[str, Role] = {"target": "target", "drafter": "drafter", "member": "target"}
    models = {name: (role, _spec(name), given[f"{name}s"]) for name, role in roles.items() if given[f"{name}s"]}
    with running_fleet(models) as running:

        def ask(request: Request, answer: Transcript) -> None:
            collect(in_process.stream(running.coordinator, fresh(request), running.check), answer)

        undisturbed = _undisturbed(ask, cases, streams)
        click.echo(f"{len(undisturbed)} different requests answered without faults")
        steady = [case for case in cases if case.number in undisturbed]
        load = Streams(ask, steady, streams, seed=seed)
        load.start()
        injector = FaultInjector(running, seed=seed)
        injector.run(draw(counts, seed=seed), interval_s=interval_s, report=click.echo)
        answers = load.finish()
        running.check()
    findings = judge(answers, undisturbed, injector.faults, alone_s=_ALONE_S)
    click.echo("\n" + as_text(findings))
    settings = given | {"interval_s": interval_s, "streams": streams, "seed": seed}
    write(output, "tests.chaos", settings, **asdict(findings))
    sys.exit(findings.wrong)


def _spec(name: str) -> ModelSpec:
    return ModelSpec(name=name, path=f"models/{name}", dtype="float32", device="cpu", slots=8, threads=1)


def _undisturbed(ask: Ask[Request], cases: Sequence[Case[Request]], streams: int) -> dict[int, Transcript]:
    """Return the answers without faults, by case. Leaves out cases whose two answers differ by rounding."""
    answers: dict[int, Transcript] = {}
    unsteady: set[int] = set()
    for seed in range(2):
        calm = Streams(ask, cases, streams, seed=seed)
        calm.start(rounds=1)
        for case, answer in calm.finish():
            if answer.error is not None:
                raise click.ClickException(f"{case.kind}: {answer.error}")
            if not answer.same_as(answers.setdefault(case.number, answer)):
                click.echo(f"{case.kind}: has two answers even without faults, and is left out")
                unsteady.add(case.number)
    return {number: answer for number, answer in answers.items() if number not in unsteady}


if __name__ == "__main__":
    main()
