"""Writes onto the coordinator's board how many more requests it accepts, and counts those that the proxy refuses."""

import asyncio
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.admission.admission import Room
from deployments.configuration.api_keys import ApiKey, KeyRing
from deployments.endpoints.service import Service
from deployments.http.doorkeeper import BOARD, NO_KEY, PASSED, STALE_S, AdmissionBoard, Notice
from deployments.http.head import authorization_of, is_generating, on_start
from deployments.http.middleware import Drain, log_refused
from deployments.monitoring.metrics import Outcome

_LEAST_S = 0.02  # shortest time between two rounds of writing
_MOST_S = STALE_S / 12  # longest time, although nothing has changed
_MOST_SHARE = 0.05  # of the event loop's time for writing
_MOST_KEYS = 64  # keys with notices, those that asked last; others' requests are decided one by one
_IN_USE_S = 10.0  # since a key's last request


class Announcer:
    """A coordinator's notices for the keys in use."""

    def __init__(self, service: Service, keys: KeyRing, drain: Drain, board: AdmissionBoard) -> None:
        self._service, self._drain, self._board, self._keys = service, drain, board, keys
        self.board_name = board.name
        self._asked_s: dict[ApiKey, float] = {}  # by key in use; the key that asked last stands last
        self._proxy = 0  # of this node
        self._seen: dict[ApiKey, int] = {}  # the number of its last request
        self._refused: dict[ApiKey, int] = {}
        self._announced: dict[ApiKey, Room] = {}
        self._round: asyncio.Handle | None = None
        self._round_s = self._earliest_s = 0.0  # when the next round is due, and the earliest time for it
        service.admission.on_change = self.update

    def see(self, headers: Headers) -> None:
        key = self._keys.find(authorization_of(headers))
        if key is None:
            return
        if self._board.proxy != self._proxy:
            self._proxy = self._board.proxy
            self._seen.clear()
        proxy, _, number = headers[PASSED].partition(":")
        if proxy == str(self._proxy) and number.isdecimal() and len(number) < 10:
            self._seen[key] = max(self._seen.get(key, 0), int(number))
        self._use(key)
        self.update()

    def update(self) -> None:
        """Write notices soon, because something has changed."""
        if not self._asked_s:
            return
        due_s = max(asyncio.get_running_loop().time(), self._earliest_s)
        if self._round is None or self._round_s > due_s:
            self._schedule(due_s)

    def _schedule(self, due_s: float) -> None:
        if self._round is not None:
            self._round.cancel()
        self._round, self._round_s = asyncio.get_running_loop().call_at(due_s, self._write_all), due_s

    def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for key in list(self._asked_s):
            self._count_refused(key)
            self._write(key)
        for key in [key for key, asked_s in self._asked_s.items() if began_s - asked_s > _IN_USE_S]:
            del self._asked_s[key]
        took_s = loop.time() - began_s
        self._earliest_s = loop.time() + max(_LEAST_S, took_s / _MOST_SHARE)
        self._round = None
        if self._asked_s:
            self._schedule(max(self._earliest_s, loop.time() + _MOST_S))

    def _write(self, key: ApiKey) -> None:
        room = None if self._drain.has_begun else self._service.room(key)
        if room is None:
            return  # the last notice goes stale, and then requests come here
        self._announced[key] = room
        refusal, known = room.refusal, (self._proxy, self._seen.get(key, 0), self._refused.get(key, 0))
        notice = Notice(time.monotonic(), room.requests, refusal.reached, refusal.retry_s, refusal.apart_s, *known)
        self._board.write(self._line(key), notice)

    def _count_refused(self, key: ApiKey) -> None:
        total = self._board.refused(self._line(key))
        new, self._refused[key] = total - self._refused.get(key, 0), total
        if not new:
            return
        self._use(key)
        refusal = self._announced[key].refusal
        reason, endpoints = refusal.reached.bound, list(self._service.endpoints)
        endpoint = endpoints[0] if len(endpoints) == 1 else ""
        self._service.metrics.record_outcome(endpoint, key.name, Outcome(reason, refused=True), new)
        self._service.admission.count_refused(refusal, new, refusal.reached.error(refusal.retry_s).retry_after_s)
        log_refused(key.name, reason, new)

    def _use(self, key: ApiKey) -> None:
        self._asked_s.pop(key, None)
        self._asked_s[key] = asyncio.get_running_loop().time()
        if len(self._asked_s) > _MOST_KEYS:
            del self._asked_s[next(iter(self._asked_s))]

    def _line(self, key: ApiKey) -> bytes:
        return key.digest or NO_KEY


class AnnouncerMiddleware:
    """ASGI middleware that notes requests from the proxy before others may refuse them, and names the board to it."""

    def __init__(self, app: ASGIApp, *, announcer: Announcer) -> None:
        self._app, self._announcer = app, announcer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if PASSED not in headers:
            await self._app(scope, receive, send)
            return
        if is_generating(scope):
            self._announcer.see(headers)

        def name_board(message: Message) -> None:
            MutableHeaders(scope=message)[BOARD] = self._announcer.board_name

        await self._app(scope, receive, on_start(send, name_board))
