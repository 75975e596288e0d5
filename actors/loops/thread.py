"""A loop's thread, its health and its times; and a thread that returns memory while a process rests."""

import ctypes
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass

from decoding.errors import UnavailableError

_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 10.0, 60.0  # bounds of the time before a turn counts as stuck
_PATIENCE = 10.0  # multiple of the longest turn, between these bounds
_DECAY = 0.999  # of the longest turn, per turn
_IDLE_PERIOD_S = 5.0
_RESTING = 0.1  # processor time / time, up to which a process rests
_WORK_S = 1.0  # processor time after which freeing pays


@dataclass(slots=True)
class LoopTimes:
    """A model loop's times since its start, in seconds, and its counters."""

    steps: int = 0
    step_s: float = 0.0  # in batched steps, sampling included
    prefill_s: float = 0.0  # in prompt chunks
    drafted_s: float = 0.0  # in heads and a colocated drafter
    waited_s: float = 0.0  # with requests: for drafts (target) or verdicts (drafter)
    idle_s: float = 0.0  # without requests
    trial_loss_s: float = 0.0  # of a target: lost in trials of the slower way of decoding
    out_of_memory: int = 0  # number of forwards that ran out of memory
    preemptions: int = 0  # of rows, whose KV pages others needed
    evictions: int = 0  # of KV pages of ended texts

    def note_wait(self, seconds: float, *, with_requests: bool) -> None:
        """Add time in which nothing was computed."""
        if with_requests:
            self.waited_s += seconds
        else:
            self.idle_s += seconds

    def __sub__(self, earlier: "LoopTimes") -> "LoopTimes":
        return LoopTimes(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))

    def __add__(self, other: "LoopTimes") -> "LoopTimes":
        return LoopTimes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class LoopThread:
    """Calls `turn` repeatedly until `stop`. An exception ends the loop; `check` reports it."""

    def __init__(
        self, name: str, turn: Callable[[], None], wake: Callable[[], None], prepare: Callable[[], None] = lambda: None
    ) -> None:
        """
        wake: makes a waiting `turn` return early.
        prepare: runs first, in the loop's own thread. A model is loaded there, because OpenMP keeps a pool of workers
            for each thread that computes. Workers sleep at once if all pools together exceed the machine's cores
            (docs/experiments.md).
        """
        self._turn, self._wake, self._prepare = turn, wake, prepare
        self._prepared = threading.Event()
        self._stopping = False
        self._error: BaseException | None = None
        self._unprepared: BaseException | None = None
        self._last_turn_s = time.monotonic()
        self.usual_turn_s = 0.0  # duration of a long turn, if `prepare` measures it
        self._longest_turn_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread and wait for `prepare`; raise its error if it fails."""
        self._thread.start()
        self._prepared.wait()
        if self._unprepared is not None:
            raise self._unprepared

    def stop(self) -> None:
        """Stop the loop after its current turn, and wait for it."""
        self._stopping = True
        self._wake()
        self._thread.join()

    @property
    def patience_s(self) -> float:
        """Time after which a turn counts as stuck. It grows with the longest turn, so a slow prefill is not a hang."""
        longest_s = max(self.usual_turn_s, self._longest_turn_s)
        return min(max(_LEAST_PATIENCE_S, _PATIENCE * longest_s), _MOST_PATIENCE_S)

    def check(self, *, max_silence_s: float | None = None) -> None:
        """Check the loop's health. max_silence_s: the longest permitted turn; `patience_s` by default.

        Raises UnavailableError if the loop has ended, or its current turn takes too long.
        """
        silence_s = time.monotonic() - self._last_turn_s
        limit_s = self.patience_s if max_silence_s is None else max_silence_s
        if self._error is not None:
            raise UnavailableError(f"{self._thread.name}: the loop ended with {self._error!r}") from self._error
        if silence_s > limit_s:
            raise UnavailableError(f"{self._thread.name}: the loop has been stuck for {silence_s:.0f} s")

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            self._unprepared = self._error = error
            return
        finally:
            self._last_turn_s = time.monotonic()
            self._prepared.set()
        try:
            while not self._stopping:
                self._turn()
                now_s = time.monotonic()
                self._longest_turn_s = max(now_s - self._last_turn_s, _DECAY * self._longest_turn_s)
                self._last_turn_s = now_s
        except BaseException as error:
            self._error = error
            traceback.print_exc()


class IdleMemory:
    """Gives freed memory back to the system when a process has worked and rests.

    glibc keeps it, in every arena of its threads. Under load that is faster, but what one heavy minute needed would
    stay for ever.
    """

    def __init__(self, trim: Callable[[], object], *, period_s: float = _IDLE_PERIOD_S) -> None:
        self._trim, self._period_s = trim, period_s
        self._last_s = self._trimmed_s = 0.0  # by the process's clock

    def check(self, used_s: float) -> None:
        """Call `trim` if the process has worked since it was called last, and did little in the last period.

        used_s: processor time that the process has used so far.
        """
        rests = used_s - self._last_s <= _RESTING * self._period_s
        self._last_s = used_s
        if rests and used_s - self._trimmed_s >= _WORK_S:
            self._trimmed_s = used_s
            self._trim()

    def run(self) -> None:
        """Call `trim` now, for what a start freed, and then whenever `check` says so."""
        self._trim()
        while True:
            time.sleep(self._period_s)
            self.check(time.process_time())


def return_idle_memory() -> None:
    """Start a thread that does so now and later for this process, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        memory = IdleMemory(lambda: trim(0))
        threading.Thread(target=memory.run, name="idle memory", daemon=True).start()
