"""A target and a drafter at work on the `meta` device: drafts that come in time, their own loops, the host's clock.

What the host reads from the device is fake: every sampled token is 0. So a draft is accepted as far as it is zeros.
"""

import random
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.drafter.chain import ChainStart, DraftChain
from actors.loops.options import LoopOptions
from actors.verifier.loop import Target
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Cancel, Commit, Offer
from benchmarks.step_budget.metered_runner import MeteredRunner
from benchmarks.step_budget.traffic import Traffic
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput

LAUNCH_S = 5e-6  # from Python to the queue of a GPU, for an operator of torch
_WARM_UPS = 3  # the first steps make what rows and caches need once
_ACCEPTED = 0.6  # share of a draft's tokens that the target accepts
_generator = random.Random(0)  # of prompts, which no two stages share


class HostClock(TorchDispatchMode):
    """Measures the time of a block in seconds of this thread, so that other processes do not count.

    What torch needs to work out shapes on `meta` is not part of it: some operators take 100 times as long there. Each
    counts as long as a launch on a GPU takes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        self.exposed_s = 0.0  # of `seconds`: while the device has nothing to do
        self._idle_since_s: float | None = 0.0  # in `seconds`; None: the device computes

    def __enter__(self) -> "HostClock":
        super().__enter__()  # type: ignore[no-untyped-call]
        self.seconds -= time.thread_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.thread_time()
        self._end_idleness(self.seconds)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def note_forward(self) -> None:
        """Note that the device has begun to compute. It ends when the host reads from it."""
        self._end_idleness(self.seconds + time.thread_time())

    def _end_idleness(self, now_s: float) -> None:
        if self._idle_since_s is not None:
            self.exposed_s += now_s - self._idle_since_s
        self._idle_since_s = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        began_s = time.thread_time()
        result = function(*args, **(kwargs or {}))
        ended_s = time.thread_time()
        given, made = _on_device((args, kwargs)), _on_device(result)
        self.seconds += LAUNCH_S if given or made else ended_s - began_s
        self.seconds -= time.thread_time() - began_s  # with the clock's own work
        if given and not made and self._idle_since_s is None:  # a read, which waits for the device
            self._idle_since_s = self.seconds + time.thread_time()
        return result


def _on_device(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(values))


@contextmanager
def fake_results() -> Iterator[None]:
    """Let reads from the `meta` device give zeros, and True for a truth value.

    Replaces two of torch's operators for the whole process, at the cost of a Python call.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has kernels for both
        library.impl("copy_", _copy, "Meta")
        library.impl("_local_scalar_dense", _scalar, "Meta")
    try:
        yield
    finally:
        library._destroy()


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return target if target.is_meta else target.zero_()


def _scalar(tensor: Tensor) -> float | bool:
    return tensor.dtype == torch.bool or tensor.new_empty((), device="cpu").zero_().item()


@dataclass(frozen=True, slots=True)
class Load:
    """What the rows of a step are."""

    rows: int
    width: int  # tokens of a row: its last one and a draft
    context: int  # tokens of a row's text at the start
    params: SamplingParams


class Stage:
    """A target whose rows have their prompts in the cache."""

    def __init__(self, metered: MeteredRunner, load: Load) -> None:
        self._load, self._metered = load, metered
        exchange = LocalExchange()
        self._coordinator, self._drafter = exchange.join("coordinator"), exchange.join("drafter")
        options = LoopOptions(adaptive=False, prefill_chunk=metered.runner.max_query)
        self._target = Target(metered.runner, exchange.join("target"), options)
        self._lengths: dict[int, int] = {}  # of the rows' texts, once they have a token of their own
        speculates = load.width > 1
        for index in range(load.rows):
            prompt = [_generator.randrange(1, metered.vocab_size) for _ in range(load.context)]
            admit = Admit(
                index,
                prompt,
                len(prompt),
                load.params,
                load.width - 1,
                drafter=speculates,
                attached_drafter="drafter" if speculates else None,
            )
            self._coordinator.send("target", [admit])
        with metered.without_forwards():
            while len(self._lengths) < load.rows:
                self._target.turn()
                self._read()

    def _read(self) -> None:
        self._drafter.receive(0.0)
        for _, message in self._coordinator.receive(0.0):
            if isinstance(message, Commit):
                self._lengths[message.request_id] = message.base + len(message.tokens)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *error: object) -> None:
        """Free the rows' slots."""
        self._coordinator.send("target", [Cancel(index) for index in self._lengths])
        self._target.turn()

    def _prepare(self) -> None:
        drafted = self._load.width - 1
        accepted = round(_ACCEPTED * drafted)
        tokens = [0] * accepted + [1] * (drafted - accepted)
        probabilities = [0.9**index for index in range(1, drafted + 1)]
        for index, length in self._lengths.items() if drafted else ():
            self._drafter.send("target", [Offer(index, length, tokens, None, probabilities, None, "coordinator")])

    def traffic(self) -> Traffic:
        """Take a step, and return what it costs on the device."""
        capture = self._metered.capture
        while True:
            captured = capture.captured
            self._prepare()
            with self._metered.metered_replays() as meter:
                self._target.turn()
            self._read()
            if capture.captured == captured:
                return meter.traffic

    def host_s(self, steps: int) -> tuple[float, float]:
        """Take some steps; return medians of one: the host's time, and its part while the device has nothing to do.

        In seconds of a core.
        """
        clocks = [self._step() for _ in range(_WARM_UPS + steps)][_WARM_UPS:]
        return median(clock.seconds for clock in clocks), median(clock.exposed_s for clock in clocks)

    def _step(self) -> HostClock:
        self._prepare()
        with HostClock() as clock:
            self._metered.capture.on_replay = clock.note_forward
            self._target.turn()
        self._read()
        return clock


class ChainStage:
    """A drafter whose rows all want a chain."""

    def __init__(self, metered: MeteredRunner, load: Load) -> None:
        """load: a row's width is the number of its draft tokens and one more."""
        self._metered, self._length = metered, load.width - 1
        self._starts = [
            ChainStart(RowInput(slot, load.context, [1]), load.params, load.context + 1) for slot in range(load.rows)
        ]
        self._chain = DraftChain(metered.runner)
        self._chain.warm_up()

    def traffic(self) -> Traffic:
        """Run a chain; return what it costs on the device."""
        self._chain.run(self._starts, self._length)  # captured now, if it was not at the start
        with self._metered.metered_replays() as meter:
            self._chain.run(self._starts, self._length)
        return meter.traffic

    def host_s(self, chains: int) -> float:
        """Run some chains; return the median of the host's time for one, in seconds of a core."""
        seconds = []
        for _ in range(_WARM_UPS + chains):
            with HostClock() as clock:
                self._chain.run(self._starts, self._length)
            seconds.append(clock.seconds)
        return median(seconds[_WARM_UPS:])
