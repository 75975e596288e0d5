"""A long time with all slots in use: nothing may leak, and every answer must be what it was at the start.

    make soak ARGS="--minutes 15"

Requests of all kinds, beam searches and prompts that begin alike among them, come at random from more clients than
there are slots; many hang up at random moments. After each round all slots must be free. The memory of every process
has to level off: it is what the system sees, the allocator's own reserves included. Target, member and drafter are
processes of their own, or threads of this one (`--in-process`).
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

import torch

from actors.coordinator import blocking
from actors.coordinator.request import Delta, Request
from actors.loading.checkpoint import ModelSpec, load_tokenizer
from actors.loading.grammar_tokenizer import structure_tokenizer
from actors.loops.options import LoopOptions
from actors.model.runner import Runner
from actors.replica.in_process import Engine
from actors.replica.replica import Role, load_runner
from benchmarks.chaos.fleet import Fleet, running_fleet
from benchmarks.chaos.load import Case, collect, make_cases
from benchmarks.micro.process_memory import rss_bytes
from decoding.beams.options import BeamOptions
from decoding.sampling.params import SamplingParams

_HANG_UPS = 0.4  # of all requests
_SETTLE_S = 30.0  # until nothing is in progress, after the last client's end
_SAMPLE_S = 0.05
_MAX_LENGTH = 384
_MOST_MIB = 16.0  # that the last third of the rounds may add to any process
_MOST_OBJECTS = 0.02  # that all rounds after the first may add
_MODELS: Mapping[str, Role] = {"target": "target", "member": "target", "drafter": "drafter"}


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one."""

    asked: int
    hung_up: int
    wrong: list[str]  # answers that were not what they had been at the start
    occupancy: float  # mean share of the target's slots in use
    leaked: dict[str, int]  # slots that are not free, by replica
    rss_bytes: dict[str, int]  # by process
    objects: int  # of this process


@dataclass(frozen=True, slots=True)
class Served:
    """What a soak is of."""

    stream: Callable[[Request], Iterator[Delta]]
    slots: int  # of the target
    in_use: Callable[[], Mapping[str, int]]  # slots, by replica
    pids: Mapping[str, int]  # by what the process is called


class Soak:
    """Targets, members and drafters under load."""

    def __init__(self, served: Served, cases: Sequence[Case], *, seed: int) -> None:
        self._served, self._cases = served, cases
        self._streams = 2 * served.slots
        self._chance = random.Random(seed)
        with ThreadPoolExecutor(4) as pool:
            self._expected = list(pool.map(lambda case: collect(served.stream(case.fresh())), cases))

    def round(self, seconds: float) -> Round:
        """Keep all clients busy for that long."""
        until_s = time.monotonic() + seconds
        occupied: list[float] = []
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(occupied, done))
        watch.start()
        with ThreadPoolExecutor(self._streams) as pool:
            probabilities = [random.Random(self._chance.random()) for _ in range(self._streams)]
            told = [each for found in pool.map(lambda one: self._ask(one, until_s), probabilities) for each in found]
        done.set()
        watch.join()
        leaked = self._leaked()
        gc.collect()
        return Round(
            asked=len(told),
            hung_up=sum(said is None for said in told),
            wrong=[said for said in told if said],
            occupancy=sum(occupied) / max(len(occupied), 1),
            leaked=leaked,
            rss_bytes={name: rss_bytes(pid) for name, pid in self._served.pids.items()},
            objects=len(gc.get_objects()),
        )

    def _ask(self, rng: random.Random, until_s: float) -> list[str | None]:
        """One client's requests. For each what is wrong with its answer, "" if nothing is; None: it hung up."""
        said: list[str | None] = []
        while time.monotonic() < until_s:
            at = rng.randrange(len(self._cases))
            case = self._cases[at]
            deltas = self._served.stream(case.fresh())
            if rng.random() < _HANG_UPS:
                list(itertools.islice(deltas, int(rng.expovariate(0.2))))
                del deltas  # which cancels the request
                said.append(None)
            else:
                answer = collect(deltas)
                said.append("" if answer.same_as(self._expected[at]) else f"{case.kind}: {answer}")
        return said

    def _watch(self, occupied: list[float], done: threading.Event) -> None:
        while not done.wait(_SAMPLE_S):
            occupied.append(self._served.in_use().get("target", 0) / self._served.slots)

    def _leaked(self) -> dict[str, int]:
        """Slots that are still in use when nothing should be in progress any more."""
        until_s = time.monotonic() + _SETTLE_S
        while (leaked := self._occupied()) and time.monotonic() < until_s:
            time.sleep(_SAMPLE_S)
        return leaked

    def _occupied(self) -> dict[str, int]:
        return {name: count for name, count in self._served.in_use().items() if count}


def in_this_process(engine: Engine, runners: Mapping[str, Runner]) -> Served:
    """An engine. runners: its models, by name."""
    with torch.inference_mode():  # pages that are used for the first time later would look like growth
        for runner in runners.values():
            for store in (store for stores in runner.cache.layers.values() for store in stores):
                store.fill_(0)
    return Served(
        engine.stream,
        runners["target"].cache.slots,
        lambda: {name: runner.cache.slots - runner.cache.free for name, runner in runners.items()},
        {"engine": os.getpid()},
    )


def in_processes(fleet: Fleet, slots: int) -> Served:
    """Replicas in processes of their own. slots: of the target."""
    coordinator = fleet.coordinator

    def in_use() -> dict[str, int]:
        return {address.model: report.active for address, report in coordinator.reports() if report is not None}

    pids = {post.spec.name: post.pid for post in fleet.posts}
    return Served(
        lambda request: blocking.stream(coordinator, request, fleet.check),
        slots,
        in_use,
        pids | {"coordinator": os.getpid()},
    )


def with_shared_prefixes(case: Case, *, count: int, most: int, vocab_size: int, seed: int) -> Iterator[Case]:
    """The case with other prompts, up to `most` tokens long: each continues a part of an earlier one."""
    rng = random.Random(seed)
    prompts = [list(case.request.prompt)]
    for at in range(count):
        stem = rng.choice(prompts)
        stem = stem[: rng.randint(0, len(stem))]
        prompts.append([*stem, *(rng.randrange(vocab_size) for _ in range(rng.randint(1, most)))][:most])
        params = replace(case.request.params, max_tokens=rng.randint(1, 40), seed=at, temperature=float(at % 2))
        yield Case(case.kind, replace(case.request, prompt=prompts[-1], params=params))


def with_beams(case: Case, num_beams: int) -> Case:
    """A search in place of the case's request."""
    ends = case.request.params.eos_token_ids
    params = SamplingParams(max_tokens=min(case.request.params.max_tokens, 24), temperature=0, eos_token_ids=ends)
    return Case("beams", replace(case.request, params=params, beams=BeamOptions(num_beams=num_beams)))


@contextlib.contextmanager
def _serving(*, slots: int, threads: int, in_process: bool) -> Iterator[Served]:
    """The bundled models."""
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
            yield in_processes(fleet, slots)
        return
    runners = {name: load_runner(spec) for name, spec in specs.items()}
    tokenizer = structure_tokenizer(load_tokenizer("models/target"))
    replicas = {name: (role, runners[name]) for name, role in _MODELS.items()}
    with Engine(replicas, LoopOptions(load_tokenizer=lambda: tokenizer)) as engine:
        yield in_this_process(engine, runners)


def _bundled_cases(seed: int) -> list[Case]:
    cases = make_cases(Path("models/target"), 40, 12, seed=seed)
    sampled = next(case for case in cases if case.kind == "sampled")
    searches = [with_beams(case, 2 + at % 3) for at, case in enumerate(cases) if case.kind == "greedy"]
    return [*cases, *searches, *with_shared_prefixes(sampled, count=24, most=300, vocab_size=2048, seed=seed)]


def grown(rounds: Sequence[Round]) -> tuple[dict[str, float], float]:
    """By how many MiB the last third of the rounds exceeds the others' peak, by process.

    Also how many more objects (relative) there are than after the first round.
    """
    late = max(len(rounds) // 3, 1)
    peaks = [
        {name: max(one.rss_bytes[name] for one in some) for name in rounds[0].rss_bytes}
        for some in (rounds[:-late], rounds[-late:])
    ]
    more_mib = {name: (peaks[1][name] - peaks[0][name]) / 2**20 for name in peaks[0]}
    return more_mib, rounds[-1].objects / rounds[0].objects - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing leaked, grew or differed."""
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
            rounds.append(soak.round(60 * options.minutes / options.rounds))
            print(number, rounds[-1], flush=True)
    more_mib, more_objects = grown(rounds)
    more = ", ".join(f"{name} {mib:+.1f} MiB" for name, mib in more_mib.items())
    print(f"{sum(one.asked for one in rounds)} requests; {more}; {more_objects:+.2%} objects")
    if options.output:
        options.output.write_text(json.dumps([asdict(one) for one in rounds], indent=1) + "\n", encoding="utf-8")
    fine = all(not one.wrong and not one.leaked for one in rounds)
    return 0 if fine and max(more_mib.values()) < _MOST_MIB and more_objects < _MOST_OBJECTS else 1


if __name__ == "__main__":
    sys.exit(main())
