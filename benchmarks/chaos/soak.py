"""Soak test: with all slots in use for a long time, nothing may leak, and every answer must stay the same.

    make soak ARGS="--minutes 15"

More clients than slots send random requests of all kinds, with beam searches and shared prefixes; many disconnect at
random moments. After each round all slots must be free. The resident memory of every process must level off. Target,
member and drafter run in child processes, or in threads of this process (`--in-process`).
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from actors.coordinator.request import Delta, Request
from actors.loops.options import LoopOptions
from actors.replica import in_process
from actors.replica.in_process import Engine
from actors.replica.replica import load_runner
from actors.replica.roles import Role
from benchmarks.chaos.fleet import Fleet, running_fleet
from benchmarks.chaos.load import Case, collect, make_cases
from decoding.beams.options import BeamOptions
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import load_tokenizer
from engine.loading.tokenizers import structure_tokenizer
from engine.model.runner import Runner

_DISCONNECTS = 0.4  # share of all requests
_SETTLE_S = 30.0  # maximum time after the last client's end until all slots are free
_SAMPLE_S = 0.05
_MAX_LENGTH = 384
_MOST_MIB = 16.0  # maximum growth of any process in the last third of the rounds
_MOST_OBJECTS = 0.02  # maximum relative growth after the first round
_MODELS: Mapping[str, Role] = {"target": "target", "member": "target", "drafter": "drafter"}


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

    def __init__(self, served: ServedModels, cases: Sequence[Case], *, seed: int) -> None:
        self._served, self._cases = served, cases
        self._streams = 2 * served.slots
        self._rng = random.Random(seed)
        with ThreadPoolExecutor(4) as pool:
            self._expected = list(pool.map(lambda case: collect(served.stream(case.fresh())), cases))

    def run_round(self, seconds: float) -> Round:
        """Keep all clients busy for a time."""
        until_s = time.monotonic() + seconds
        occupied: list[float] = []
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(occupied, done))
        watch.start()
        with ThreadPoolExecutor(self._streams) as pool:
            generators = [random.Random(self._rng.random()) for _ in range(self._streams)]
            clients = pool.map(lambda rng: self._run_client(rng, until_s), generators)
            results = [result for client_results in clients for result in client_results]
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
            deltas = self._served.stream(case.fresh())
            if rng.random() < _DISCONNECTS:
                list(itertools.islice(deltas, int(rng.expovariate(0.2))))
                del deltas  # which cancels the request
                results.append(None)
            else:
                answer = collect(deltas)
                results.append("" if answer.same_as(self._expected[index]) else f"{case.kind}: {answer}")
        return results

    def _watch(self, occupied: list[float], done: threading.Event) -> None:
        while not done.wait(_SAMPLE_S):
            occupied.append(self._served.in_use().get("target", 0) / self._served.slots)

    def _leaked(self) -> dict[str, int]:
        """Wait until all slots are free. Returns those still in use after the maximum time."""
        until_s = time.monotonic() + _SETTLE_S
        while (leaked := self._occupied()) and time.monotonic() < until_s:
            time.sleep(_SAMPLE_S)
        return leaked

    def _occupied(self) -> dict[str, int]:
        return {name: count for name, count in self._served.in_use().items() if count}


def served_in_process(engine: Engine, runners: Mapping[str, Runner]) -> ServedModels:
    """Describe an engine. runners: its models by name."""
    with torch.inference_mode():  # touch all pages, because later first uses would look like growth
        for runner in runners.values():
            for store in (store for stores in runner.cache.layers.values() for store in stores):
                store.fill_(0)
    return ServedModels(
        engine.stream,
        runners["target"].cache.slots,
        lambda: {
            name: runner.cache.slots - runner.cache.free or runner.cache.allocator.used
            for name, runner in runners.items()
        },
        {"engine": os.getpid()},
    )


def served_by_fleet(fleet: Fleet, slots: int) -> ServedModels:
    """Describe a fleet. slots: of the target."""
    coordinator = fleet.coordinator

    def in_use() -> dict[str, int]:
        return {address.model: report.active for address, report in coordinator.reports() if report is not None}

    pids = {replica.spec.name: replica.pid for replica in fleet.replicas}
    return ServedModels(
        lambda request: in_process.stream(coordinator, request, fleet.check),
        slots,
        in_use,
        pids | {"coordinator": os.getpid()},
    )


def with_shared_prefixes(case: Case, *, count: int, most: int, vocab_size: int, seed: int) -> Iterator[Case]:
    """Yield cases with other prompts of at most `most` tokens; each continues a prefix of an earlier prompt."""
    rng = random.Random(seed)
    prompts = [list(case.request.prompt)]
    for index in range(count):
        stem = rng.choice(prompts)
        stem = stem[: rng.randint(0, len(stem))]
        prompts.append([*stem, *(rng.randrange(vocab_size) for _ in range(rng.randint(1, most)))][:most])
        params = replace(case.request.params, max_tokens=rng.randint(1, 40), seed=index, temperature=float(index % 2))
        yield Case(case.kind, replace(case.request, prompt=prompts[-1], params=params))


def with_beams(case: Case, num_beams: int) -> Case:
    """Return a beam search in place of the case's request."""
    ends = case.request.params.eos_token_ids
    params = SamplingParams(max_tokens=min(case.request.params.max_tokens, 24), temperature=0, eos_token_ids=ends)
    return Case("beams", replace(case.request, params=params, beams=BeamOptions(num_beams=num_beams)))


@contextlib.contextmanager
def _serving(*, slots: int, threads: int, in_process: bool) -> Iterator[ServedModels]:
    """Serve the bundled models."""
    specs = {
        name: ModelSpec(
            name=name,
            path=f"models/{name}",
            dtype="float32",
            device="cpu",
            slots=slots,
            max_length=_MAX_LENGTH,
            threads=threads,
        )
        for name in _MODELS
    }
    if not in_process:
        with running_fleet({name: (role, specs[name], 1) for name, role in _MODELS.items()}) as fleet:
            yield served_by_fleet(fleet, slots)
        return
    runners = {name: load_runner(spec) for name, spec in specs.items()}
    tokenizer = structure_tokenizer(load_tokenizer("models/target"))
    replicas = {name: (role, runners[name]) for name, role in _MODELS.items()}
    with Engine(replicas, LoopOptions(load_tokenizer=lambda: tokenizer)) as engine:
        yield served_in_process(engine, runners)


def _bundled_cases(seed: int) -> list[Case]:
    cases = make_cases(Path("models/target"), 40, 12, seed=seed)
    sampled = next(case for case in cases if case.kind == "sampled")
    searches = [with_beams(case, 2 + index % 3) for index, case in enumerate(cases) if case.kind == "greedy"]
    return [*cases, *searches, *with_shared_prefixes(sampled, count=24, most=300, vocab_size=2048, seed=seed)]


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak test. Returns 0 if nothing leaked, grew or differed, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of each model")
    parser.add_argument("--in-process", action="store_true", help="all models in this process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    cases = _bundled_cases(options.seed)
    with _serving(slots=options.slots, threads=options.threads, in_process=options.in_process) as served:
        soak = Soak(served, cases, seed=options.seed)
        rounds: list[Round] = []
        for number in range(options.rounds):
            rounds.append(soak.run_round(60 * options.minutes / options.rounds))
            print(number, rounds[-1], flush=True)
    more_mib, more_objects = growth(rounds)
    more = ", ".join(f"{name} {mib:+.1f} MiB" for name, mib in more_mib.items())
    print(f"{sum(result.requests for result in rounds)} requests; {more}; {more_objects:+.2%} objects")
    if options.output:
        options.output.write_text(json.dumps([asdict(result) for result in rounds], indent=1) + "\n", encoding="utf-8")
    succeeded = all(not result.wrong and not result.leaked for result in rounds)
    return 0 if succeeded and max(more_mib.values()) < _MOST_MIB and more_objects < _MOST_OBJECTS else 1


if __name__ == "__main__":
    sys.exit(main())
