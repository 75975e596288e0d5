"""What every model loop does with its messages: wait, account for the wait, answer for its rows, report."""

import logging
import time
from collections.abc import Callable
from typing import Generic

from actors.loops.row_table import R, RowKey, RowTable
from actors.loops.thread import LoopTimes
from actors.wire.link import Envelope, Link, Outbox
from actors.wire.messages import Cancel, Failed, Heartbeat, Message
from decoding.errors import ConsortError, InvalidRequestError

REPORT_PERIOD_S = 1.0
_MAX_SILENCE_S = 30.0
_ABSENT_S = 10.0  # between two turns: one took so long, or the process was stopped
_log = logging.getLogger(__name__)


class Mailbox(Generic[R]):
    """A loop's link, seen from its rows."""

    def __init__(
        self, link: Link, rows: RowTable[R], times: LoopTimes, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: lets tests move the time, in seconds."""
        self._link = link
        self._outbox = Outbox(link)
        self._rows = rows
        self._times = times
        self._clock = clock
        self._heard_at_s: dict[str, float] = {}  # by coordinator
        self._reported_at_s = 0.0

    def receive(self, timeout_s: float) -> list[Envelope]:
        """What has arrived and is the loop's own business; waits up to `timeout_s` for it."""
        began_s = time.perf_counter()
        envelopes = self._link.receive(timeout_s)
        self._times.note_wait(time.perf_counter() - began_s, with_requests=len(self._rows) > 0)
        return [envelope for envelope in envelopes if not self._handle(*envelope)]

    def put(self, peer: str, message: Message) -> None:
        """Send a message at the end of this turn."""
        self._outbox.put(peer, message)

    def give_back(self, key: RowKey, admission: int, error: BaseException) -> None:
        """Forget a request that can't go on here, and tell its peer why."""
        self._rows.remove(key)
        peer, request_id = key
        reason, field = str(error), error.field if isinstance(error, InvalidRequestError) else None
        if not isinstance(error, ConsortError):
            _log.error("request %d can't go on", request_id, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        self.put(peer, Failed(request_id, reason, field, admission))

    def flush(self) -> None:
        """Send at once what was put."""
        self._outbox.flush()

    def close_turn(self) -> None:
        """Send what was put; now and then, report, and forget the rows of coordinators that fell silent."""
        now_s = self._clock()
        since_s = now_s - self._reported_at_s
        if since_s >= REPORT_PERIOD_S:
            self._reported_at_s = now_s
            if since_s > _ABSENT_S:  # nobody could be heard
                self._heard_at_s = dict.fromkeys(self._heard_at_s, now_s)
            for peer, heard_at_s in list(self._heard_at_s.items()):
                if now_s - heard_at_s > _MAX_SILENCE_S:
                    self._rows.remove_peer(peer)
                    del self._heard_at_s[peer]
                else:
                    self._outbox.put(peer, self._rows.report(peer))
        self._outbox.flush()

    def _handle(self, peer: str, message: Message) -> bool:
        """Note the sign of life; True if that, or a row's removal, was all that there is to do."""
        self._heard_at_s[peer] = self._clock()
        if isinstance(message, Cancel):
            self._rows.remove((peer, message.request_id))
        return isinstance(message, Cancel | Heartbeat)
