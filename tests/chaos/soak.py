"""With all slots in use for a long time, nothing may leak, and every answer must stay the same.

More clients than slots send random requests of all kinds, with beam searches and shared prefixes; many disconnect at
random moments. After each round all slots must be free. The resident memory of every process must level off.
"""

import gc
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import psutil  # type: ignore[import-untyped]

from actors.coordinator.request import Delta, Request
from actors.replica import in_process
from actors.replica.roles import Role
from benchmarks.report import write
from decoding.beams.options import BeamOptions
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from tests.chaos.cases import collect, fresh, make_cases
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.load import Case, Transcript, ask_into

_DISCONNECTS = 0.4  # share of all requests
_SETTLE_S = 30.0  # maximum time after the last client's end until all slots are free
_SAMPLE_S = 0.05
_MOST_MIB = 16.0  # maximum growth of any process in the last third of the rounds
_MOST_OBJECTS = 0.02  # maximum relative growth after the first round
_ROLES: Mapping[str, Role] = {"target": "target", "member": "target", "drafter": "drafter"}


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round."""

    requests: int
    disconnected: int
    wrong: list[str]  # answers that differ from those at the start
    occupancy: float  # mean share of the target's slots in use
    leaked: dict[str, int]  # slots still in use, by replica
    rss_bytes: dict[str, int]  # by process
    objects: int  # of this process


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The running models, and access to their slots and processes."""

    stream: Callable[[Request], Iterator[Delta]]
    slots: int  # of the target
    in_use: Callable[[], Mapping[str, int]]  # slots, by replica
    pids: Mapping[str, int]  # by name of the process


class Soak:
    """Runs rounds of load on served models."""

    def __init__(self, served: ServedModels, cases: Sequence[Case[Request]], *, seed: int) -> None:
        self._served, self._cases = served, cases
        self._streams = 2 * served.slots
        self._rng = random.Random(seed)
        with ThreadPoolExecutor(4) as pool:
            self._expected = list(pool.map(self._answer, cases))

    def _answer(self, case: Case[Request]) -> Transcript:
        return ask_into(
            lambda request, answer: collect(self._served.stream(fresh(request)), answer), case, Transcript()
        )

    def run_round(self, seconds: float) -> Round:
        """Keep all clients busy for a time."""
        until_s = time.monotonic() + seconds
        occupied: list[float] = []
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(occupied, done))
        watch.start()
        try:
            with ThreadPoolExecutor(self._streams) as pool:
                generators = [random.Random(self._rng.random()) for _ in range(self._streams)]
                results = list(itertools.chain(*pool.map(lambda rng: self._run_client(rng, until_s), generators)))
        finally:
            done.set()
            watch.join()
        leaked = self._leaked()
        gc.collect()
        return Round(
            requests=len(results),
            disconnected=sum(result is None for result in results),
            wrong=[result for result in results if result],
            occupancy=sum(occupied) / max(len(occupied), 1),
            leaked=leaked,
            rss_bytes={name: psutil.Process(pid).memory_info().rss for name, pid in self._served.pids.items()},
            objects=len(gc.get_objects()),
        )

    def _run_client(self, rng: random.Random, until_s: float) -> list[str | None]:
        """Send a client's requests. Returns for each a wrong answer, "" for a right one, or None if it disconnected."""
        results: list[str | None] = []
        while time.monotonic() < until_s:
            index = rng.randrange(len(self._cases))
            case = self._cases[index]
            if rng.random() < _DISCONNECTS:
                deltas = self._served.stream(fresh(case.request))
                list(itertools.islice(deltas, int(rng.expovariate(0.2))))
                del deltas  # which cancels the request
                results.append(None)
            else:
                answer = self._answer(case)
                results.append("" if answer.same_as(self._expected[index]) else f"{case.kind}: {answer}")
        return results

    def _watch(self, occupied: list[float], done: threading.Event) -> None:
        while not done.wait(_SAMPLE_S):
            occupied.append(self._served.in_use().get("target", 0) / self._served.slots)

    def _leaked(self) -> dict[str, int]:
        """Wait until all slots are free. Returns those still in use after the maximum time."""
        until_s = time.monotonic() + _SETTLE_S
        while True:
            leaked = {name: count for name, count in self._served.in_use().items() if count}
            if not leaked or time.monotonic() > until_s:
                return leaked
            time.sleep(_SAMPLE_S)


def with_shared_prefixes(
    case: Case[Request], *, count: int, most: int, vocab_size: int, seed: int
) -> Iterator[Case[Request]]:
    """Yield cases with other prompts of at most `most` tokens; each continues a prefix of an earlier prompt."""
    rng = random.Random(seed)
    prompts = [list(case.request.prompt)]
    for index in range(count):
        stem = rng.choice(prompts)
        stem = stem[: rng.randint(0, len(stem))]
        prompts.append([*stem, *(rng.randrange(vocab_size) for _ in range(rng.randint(1, most)))][:most])
        params = replace(case.request.params, max_tokens=rng.randint(1, 40), seed=index, temperature=float(index % 2))
        yield Case(case.kind, index, replace(case.request, prompt=prompts[-1], params=params))


def with_beams(case: Case[Request], num_beams: int) -> Case[Request]:
    """Return a beam search in place of the case's request."""
    ends = case.request.params.eos_token_ids
    params = SamplingParams(max_tokens=min(case.request.params.max_tokens, 24), temperature=0, eos_token_ids=ends)
    return Case("beams", case.number, replace(case.request, params=params, beams=BeamOptions(num_beams=num_beams)))


def growth(rounds: Sequence[Round]) -> tuple[dict[str, float], float]:
    """Return the growth of memory in MiB by process, and the relative growth of the number of objects.

    Memory: peak of the last third of the rounds less the peak before. Objects: relative to the first round.
    """
    late = max(len(rounds) // 3, 1)
    peaks = [
        {name: max(result.rss_bytes[name] for result in part) for name in rounds[0].rss_bytes}
        for part in (rounds[:-late], rounds[-late:])
    ]
    more_mib = {name: (peaks[1][name] - peaks[0][name]) / 2**20 for name in peaks[0]}
    return more_mib, rounds[-1].objects / rounds[0].objects - 1


@click.command(context_settings={"show_default": True})
@click.option("--minutes", default=15.0)
@click.option("--rounds", "count", default=15)
@click.option("--slots", default=8, help="Of each model; a beam search takes up to four.")
@click.option("--threads", default=1, help="Of each model.")
@click.option("--seed", default=0)
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/soak.json"))
def soak(minutes: float, count: int, slots: int, threads: int, seed: int, output: Path) -> None:
    """Keep all slots in use: nothing may leak, grow or differ."""
    common = ModelSpec(name="", path="", dtype="float32", device="cpu", slots=slots, max_length=384, threads=threads)
    specs = {name: replace(common, name=name, path=f"models/{name}") for name in _ROLES}
    with running_fleet({name: (role, specs[name], 1) for name, role in _ROLES.items()}) as fleet:
        running = Soak(_served(fleet, slots), _cases(seed), seed=seed)
        rounds: list[Round] = []
        for number in range(count):
            rounds.append(running.run_round(60 * minutes / count))
            click.echo(f"{number} {rounds[-1]}")
    more_mib, more_objects = growth(rounds)
    more = ", ".join(f"{name} {mib:+.1f} MiB" for name, mib in more_mib.items())
    click.echo(f"{sum(result.requests for result in rounds)} requests; {more}; {more_objects:+.2%} objects")
    write(output, "tests.chaos", {"minutes": minutes, "slots": slots}, rounds=list(map(asdict, rounds)))
    right = all(not result.wrong and not result.leaked for result in rounds)
    sys.exit(not (right and max(more_mib.values()) < _MOST_MIB and more_objects < _MOST_OBJECTS))


def _served(fleet: Fleet, slots: int) -> ServedModels:
    coordinator = fleet.coordinator

    def in_use() -> dict[str, int]:
        return {address.model: report.active for address, report in coordinator.reports() if report is not None}

    pids = {replica.spec.name: replica.pid for replica in fleet.replicas} | {"coordinator": os.getpid()}
    return ServedModels(lambda request: in_process.stream(coordinator, request, fleet.check), slots, in_use, pids)


def _cases(seed: int) -> list[Case[Request]]:
    cases = make_cases(Path("models/target"), 40, 12, seed=seed)
    sampled = next(case for case in cases if case.kind == "sampled")
    searches = [with_beams(case, 2 + index % 3) for index, case in enumerate(cases) if case.kind == "greedy"]
    return [*cases, *searches, *with_shared_prefixes(sampled, count=24, most=300, vocab_size=2048, seed=seed)]
