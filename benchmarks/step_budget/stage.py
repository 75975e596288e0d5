"""A target at work on the `meta` device: rows, drafts that come in time, and its own loop.

The host's results are fake: every sampled token is 0. So the part of a draft that consists of zeros is accepted.
"""

import random
from dataclasses import dataclass
from statistics import median

from actors.loops.options import LoopOptions
from actors.verifier.loop import Target
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Cancel, Commit, Offer
from benchmarks.step_budget.host_clock import HostClock
from benchmarks.step_budget.metered_runner import MeteredRunner
from benchmarks.step_budget.traffic import Traffic
from decoding.sampling.params import SamplingParams

WARM_UPS = 3  # the first steps make what rows and caches need once
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
        self._admit()

    def _admit(self) -> None:
        load, vocab_size = self._load, self._metered.vocab_size
        for index in range(load.rows):
            prompt = [_generator.randrange(1, vocab_size) for _ in range(load.context)]
            speculates = load.width > 1
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
        with self._metered.without_forwards():
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
        if drafted:
            self._drafter.send(
                "target",
                [
                    Offer(index, length, tokens, None, probabilities, None, "coordinator")
                    for index, length in self._lengths.items()
                ],
            )

    def traffic(self) -> Traffic:
        """Take a step, and return what it costs on the device."""
        capture = self._metered.capture
        while True:
            captured = capture.captured
            self._prepare()
            with self._metered.metered() as meter:
                capture.traffic = meter.traffic
                self._target.turn()
                capture.traffic = None
            self._read()
            if capture.captured == captured:
                return meter.traffic

    def host_s(self, steps: int) -> tuple[float, float]:
        """Take some steps; return medians of one: the host's time, and its part while the device has nothing to do.

        In seconds of a core.
        """
        for _ in range(WARM_UPS):
            self._step()
        clocks = [self._step() for _ in range(steps)]
        return median(clock.seconds for clock in clocks), median(clock.exposed_s for clock in clocks)

    def _step(self) -> HostClock:
        self._prepare()
        with HostClock() as clock:
            self._metered.capture.on_replay = clock.note_forward
            self._target.turn()
        self._read()
        return clock
