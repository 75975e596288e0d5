"""A target and a drafter at work on the `meta` device: rows, drafts that come in time, and their own loops.

The host's results are fake: every sampled token is 0. So the part of a draft that consists of zeros is accepted.
"""

import random
from dataclasses import dataclass
from statistics import median

from actors.drafter.chain import ChainStart, DraftChain
from actors.loops.options import LoopOptions
from actors.verifier.loop import Target
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Cancel, Commit, Offer
from benchmarks.step_budget.host import HostClock
from benchmarks.step_budget.metered_runner import MeteredRunner
from benchmarks.step_budget.traffic import Traffic
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput

_WARM_UPS = 3  # the first steps make what rows and caches need once
_ACCEPTED = 0.6  # share of a draft's tokens that the target accepts
_generator = random.Random(0)  # of prompts, which no two stages share


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
        """Note what the target committed."""
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
        """Let the drafts for the next step arrive."""
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
