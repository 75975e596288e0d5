"""Speed of speculation over plain decoding from a target's first second on, with streams that never pause.

Loops begin anew, with models that stay loaded, so each run starts as ignorant as a new replica. Runs with drafts and
without alternate; both use the same target, cores, prompts and seeds. A disaggregated drafter shares the cores.

python -m benchmarks.micro.first_half_minute --streams 8 --temperature 1
"""

import argparse
import itertools
import math
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.thread import LoopThread
from actors.wire.zmq_link import ConnectingZmqLink
from benchmarks.inflated import inflated_target
from benchmarks.peers.hosts import Child
from benchmarks.peers.processes import open_replica
from benchmarks.peers.replica import MeasuredReplica
from benchmarks.report import write
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import load_tokenizer
from training.heldout import read_prompts

_WARM_UP_S = 5.0
_SETTLING_S = 0.3  # until replicas know that all requests have ended


@dataclass(frozen=True, slots=True)
class Run:
    """One run: the tokens committed until each mark, and what trials cost."""

    tokens: Mapping[float, int]  # by seconds since the start
    trial_loss_s: float
    acceptance_length: float  # tokens per target step and stream


class Load:
    """Streams over one endpoint: each begins its next request when one ends."""

    def __init__(self, coordinator: Coordinator, endpoint: Endpoint, prompts: Sequence[list[int]]) -> None:
        self._coordinator, self._endpoint, self._prompts = coordinator, endpoint, prompts
        self._lock, self._active, self._stopped = threading.Lock(), dict[int, Request](), False
        self._numbers = itertools.count()
        self._events: list[tuple[float, int]] = []
        self._steps = self._committed = 0

    def run(self, *, streams: int, seconds: float, marks: Sequence[float], temperature: float, length: int) -> Run:
        """Decode for so many seconds, then cancel what is left."""
        self._began_s = time.perf_counter()
        for _ in range(streams):
            self._next(temperature, length)
        time.sleep(seconds)
        with self._lock:
            self._stopped = True
        for request_id in list(self._active):
            self._coordinator.cancel(request_id)
        time.sleep(_SETTLING_S)
        tokens = {mark: sum(count for at_s, count in self._events if at_s <= mark) for mark in marks}
        return Run(tokens, 0.0, self._committed / max(self._steps, 1))

    def _next(self, temperature: float, length: int) -> None:
        number = next(self._numbers)
        params = SamplingParams(max_tokens=length, temperature=temperature, seed=number)
        request = Request(self._endpoint, self._prompts[number % len(self._prompts)], params)
        with self._lock:
            if self._stopped:
                return
            self._active[request.request_id] = request
        self._coordinator.submit(request, partial(self._take, request, temperature, length))

    def _take(self, request: Request, temperature: float, length: int, delta: Delta) -> None:
        if delta.error is not None:
            raise delta.error
        self._events.append((time.perf_counter() - self._began_s, len(delta.tokens)))
        if delta.finish is not None:
            self._steps += delta.statistics.steps
            self._committed += delta.statistics.committed
            self._active.pop(request.request_id, None)
            self._next(temperature, length)


class Bench:
    """A coordinator, a target, and its drafter, colocated or in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        slots = max(options.streams)
        spec = ModelSpec(name="target", path=str(inflated_target()), device="cpu", slots=slots, threads=options.threads)
        drafter = ModelSpec(name="drafter", path="models/drafter", device="cpu", slots=slots, threads=1)
        tokenizer = load_tokenizer("models/target")
        self._prompts = [tokenizer.encode(text) for text in read_prompts(Path("models/heldout.jsonl"))]
        colocated = options.drafter == "colocated"
        self._replicas = [
            Child(
                partial(open_replica, "adaptive-target", spec, drafter if colocated else None), threads=options.threads
            )
        ]
        if not colocated:
            self._replicas.append(Child(partial(open_replica, "drafter", drafter, None), threads=1))
        self._colocated = colocated

    @contextmanager
    def running(self) -> Iterator[None]:
        """Load the models; the processes end with the block."""
        with ExitStack() as stack:
            addresses = []
            for replica in self._replicas:
                stack.enter_context(replica)
                addresses.append(replica.call(attrgetter("link.address")))
            link = ConnectingZmqLink("bench")
            stack.callback(link.close)
            self._coordinator = Coordinator(link, max_silence_s=math.inf)
            thread = LoopThread("coordinator", self._coordinator.turn, link.wake)
            thread.start()
            stack.callback(thread.stop)
            self._coordinator.set_replicas(addresses)
            yield

    def run(self, *, drafts: bool, streams: int, temperature: float, seconds: float) -> Run:
        """Run the load on loops that begin anew."""
        for replica in self._replicas:
            replica.call(MeasuredReplica.restart)
            replica.call(MeasuredReplica.clear_cache)
        drafter, length = ("drafter", self._options.draft_length) if drafts else (None, 0)
        endpoint = Endpoint("bench", "target", drafter, length, lambda tokens: "", colocated=self._colocated)
        load = Load(self._coordinator, endpoint, self._prompts)
        run = load.run(
            streams=streams,
            seconds=seconds,
            marks=self._options.marks,
            temperature=temperature,
            length=self._options.new_tokens,
        )
        times = self._replicas[0].call(MeasuredReplica.take_times)
        return Run(run.tokens, times.trial_loss_s, run.acceptance_length)


def main() -> None:
    """Print a line per number of streams and temperature, and write JSON."""
    options = _options()
    bench, comparisons = Bench(options), list[dict[str, object]]()
    with bench.running():
        bench.run(drafts=True, streams=max(options.streams), temperature=0.0, seconds=_WARM_UP_S)
        for temperature, streams in itertools.product(options.temperature, options.streams):
            runs: dict[bool, list[Run]] = {True: [], False: []}
            for repetition in range(options.repetitions):
                for drafts in (True, False) if repetition % 2 else (False, True):
                    run = bench.run(drafts=drafts, streams=streams, temperature=temperature, seconds=options.seconds)
                    runs[drafts].append(run)
            ratios = {
                mark: [on.tokens[mark] / off.tokens[mark] for on, off in zip(runs[True], runs[False], strict=True)]
                for mark in options.marks
            }
            comparisons.append({"streams": streams, "temperature": temperature, "ratios": ratios})
            comparisons[-1] |= {"on": [*map(asdict, runs[True])], "off": [*map(asdict, runs[False])]}
            shown = ", ".join(f"{statistics.median(each):.3f} by {mark:g} s" for mark, each in ratios.items())
            lost_s = statistics.median(run.trial_loss_s for run in runs[True])
            print(f"T = {temperature:g}, {streams} streams: on ÷ off {shown}; trials lost {lost_s:.2f} s", flush=True)
    if options.output:
        write(options.output, "benchmarks.micro.first_half_minute", vars(options), found=comparisons)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", choices=("disaggregated", "colocated"), default="disaggregated")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--temperature", type=float, nargs="+", default=(0.0, 1.0))
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--marks", type=float, nargs="+", default=(5.0, 10.0, 30.0), help="when to compare, in seconds")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft-length", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2, help="of the target; a disaggregated drafter has one")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
