"""Messages of a model loop: receives and sends them, measures waits, cancels rows, reports load."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic

from actors.loops.row import R, RowKey
from actors.loops.row_table import RowTable
from actors.loops.thread import LoopTimes
from actors.wire.link import Envelope, Link, Outbox
from actors.wire.messages import Cancel, Failed, Heartbeat, Message
from decoding.errors import ConsortError, InvalidRequestError

REPORT_PERIOD_S = 1.0
_MAX_SILENCE_S = 30.0
_MAX_UNREACHABLE_S = 2.0  # a process that lives connects anew in a fraction of that
_MAX_EARLY = 256  # messages; most of those that are kept are late, not early, and nobody takes them
_ABSENT_S = 10.0  # between two turns: a turn took so long, or the process was stopped
_log = logging.getLogger(__name__)


class Mailbox(Generic[R]):
    """Connects a loop's rows to its link."""

    def __init__(
        self, link: Link, rows: RowTable[R], times: LoopTimes, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: lets tests move the time, in seconds."""
        self._link = link
        self._outbox = Outbox(link)
        self.reaches = link.reaches  # whether a peer has a connection
        self.put = self._outbox.put  # queues a message for a peer until `flush` or the end of the turn
        self._rows = rows
        self._times = times
        self._clock = clock
        self._early: deque[tuple[RowKey, Envelope]] = deque(maxlen=_MAX_EARLY)
        self._received_at_s: dict[str, float] = {}  # by peer
        self._reached_at_s: dict[str, float] = {}  # by peer
        self._reported_at_s = 0.0

    def receive(self, timeout_s: float) -> Iterator[Envelope]:
        """Yield messages that the loop itself must handle. Wait up to `timeout_s` for the first message.

        Handle each before the next is fetched: a cancellation must not overtake the admission before it.
        """
        began_s = time.perf_counter()
        envelopes = self._link.receive(timeout_s)
        self._times.note_wait(time.perf_counter() - began_s, with_requests=len(self._rows) > 0)
        now_s = self._clock()
        for peer, message in envelopes:
            self._received_at_s[peer] = now_s  # a sign of life
            if isinstance(message, Cancel):
                self._rows.remove((peer, message.request_id))
            elif not isinstance(message, Heartbeat):
                yield peer, message

    def keep(self, key: RowKey, peer: str, message: Message) -> None:
        """Keep a message about an admission that is not here. Links keep each sender's order, but not that of two."""
        self._early.append((key, (peer, message)))

    def take_early(self, key: RowKey) -> list[Envelope]:
        """Return what came before the request's admission, oldest first, once."""
        taken = [envelope for early, envelope in self._early if early == key]
        if taken:
            self._early = deque([kept for kept in self._early if kept[0] != key], _MAX_EARLY)
        return taken

    def fail(self, key: RowKey, admission: int, error: BaseException, invitation: int = 0) -> None:
        """Remove a request that can't go on here, and send the reason to its coordinator or leader."""
        self._rows.remove(key)
        peer, request_id = key
        reason, field = str(error), error.field if isinstance(error, InvalidRequestError) else None
        if not isinstance(error, ConsortError):
            _log.error("request %d can't go on", request_id, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        self.put(peer, Failed(request_id, reason, field, admission, invitation))

    def report_soon(self) -> None:
        """Report at the end of this turn."""
        self._reported_at_s = min(self._reported_at_s, self._clock() - REPORT_PERIOD_S)

    def flush(self) -> None:
        self._outbox.flush()

    def close_turn(self) -> None:
        """Send queued messages. Every REPORT_PERIOD_S, report and drop the rows of silent coordinators."""
        now_s = self._clock()
        since_s = now_s - self._reported_at_s
        if since_s >= REPORT_PERIOD_S:
            self._reported_at_s = now_s
            if since_s > _ABSENT_S:  # nothing could be received
                self._received_at_s = dict.fromkeys(self._received_at_s, now_s)
                self._reached_at_s.clear()
            for peer in list(self._received_at_s):
                if self._is_lost(peer, now_s):
                    self._rows.remove_peer(peer)
                    del self._received_at_s[peer], self._reached_at_s[peer]
                else:
                    self._outbox.put(peer, self._rows.report(peer))
        self._outbox.flush()

    def _is_lost(self, peer: str, now_s: float) -> bool:
        """Whether a coordinator has been silent for too long, or without a connection: its process has ended then."""
        if self._link.reaches(peer):
            self._reached_at_s[peer] = now_s
        unreachable_s = now_s - self._reached_at_s.setdefault(peer, now_s)
        return now_s - self._received_at_s[peer] > _MAX_SILENCE_S or unreachable_s > _MAX_UNREACHABLE_S
