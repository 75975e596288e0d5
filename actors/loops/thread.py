"""A loop in a thread of its own, with a heartbeat that a health check can read."""

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass

from decoding.errors import UnavailableError

_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 10.0, 60.0  # before a turn counts as stuck
_PATIENCE = 10.0  # times the longest turn, in between
_REMEMBERED = 0.999  # of that, from one turn to the next


@dataclass(slots=True)
class LoopTimes:
    """Where a model loop's time went since it started, in seconds, and how many steps it took."""

    steps: int = 0
    step_s: float = 0.0  # in batched steps, sampling included
    prefill_s: float = 0.0  # in prompt chunks
    drafted_s: float = 0.0  # in a drafter inside the target
    waited_s: float = 0.0  # for drafts (a target) or verdicts (a drafter), with requests in hand
    idle_s: float = 0.0  # without requests
    trial_loss_s: float = 0.0  # of a target: by trials of what proved slower, speculative or plain decoding
    out_of_memory: int = 0  # forwards that the device had too little memory for

    def note_wait(self, seconds: float, *, with_requests: bool) -> None:
        """Count time without computing."""
        if with_requests:
            self.waited_s += seconds
        else:
            self.idle_s += seconds

    def __sub__(self, earlier: "LoopTimes") -> "LoopTimes":
        return LoopTimes(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))

    def __add__(self, other: "LoopTimes") -> "LoopTimes":
        return LoopTimes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class LoopThread:
    """Calls `turn` again and again until `stop`; an exception ends the loop and is what `check` raises."""

    def __init__(
        self,
        name: str,
        turn: Callable[[], None],
        wake: Callable[[], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """
        wake: makes a waiting `turn` return early.
        prepare: what has to happen first, in the loop's own thread. OpenMP keeps a pool of workers for each thread that
            computes, and lets workers sleep at once when all pools together are larger than the machine: see
            docs/experiments.md. So a model is loaded in the thread that will run it.
        """
        self._turn, self._wake, self._prepare = turn, wake, prepare
        self._prepared = threading.Event()
        self._stopping = False
        self._error: BaseException | None = None
        self._unprepared: BaseException | None = None
        self._last_turn_s = time.monotonic()
        self.usual_turn_s = 0.0  # of a long turn: `prepare` may measure it
        self._longest_turn_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin, once `prepare` is done; raises what that raised."""
        self._thread.start()
        self._prepared.wait()
        if self._unprepared is not None:
            raise self._unprepared

    def stop(self) -> None:
        """End the loop after its current turn and wait for that."""
        self._stopping = True
        self._wake()
        self._thread.join()

    @property
    def patience_s(self) -> float:
        """How long a turn may take: a slow model's prefill is no hang, and how slow it is was measured."""
        longest_s = max(self.usual_turn_s, self._longest_turn_s)
        return min(max(_LEAST_PATIENCE_S, _PATIENCE * longest_s), _MOST_PATIENCE_S)

    def check(self, *, max_silence_s: float | None = None) -> None:
        """The health check.

        Raises:
            UnavailableError: the loop has ended, or its current turn has taken longer than `max_silence_s`, which is
                `patience_s` by default.
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
                self._longest_turn_s = max(now_s - self._last_turn_s, _REMEMBERED * self._longest_turn_s)
                self._last_turn_s = now_s
        except BaseException as error:
            self._error = error
            traceback.print_exc()
