"""Refuses requests in Serve's proxy, by a board in shared memory where the node's coordinators say what they accept.

Responses name the board. What no board says is a coordinator's to decide. Must not import slow modules.
"""

import mmap
import secrets
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.wire.shared_memory import SharedOffer, attach, create
from decoding.errors import OverloadedError
from deployments.admission.key_bounds import Reached
from deployments.apis.errors import error_response
from deployments.configuration.api_keys import secret_digest
from deployments.http.head import authorization_of, is_generating, on_start, request_id_of, with_header

PASSED = "x-consort-passed"  # request header: the proxy's random number, and the request's among those of its key
BOARD = "x-consort-board"  # response header: the name of the coordinator's board
STALE_S = 3.0  # an older notice may be wrong
_ON_THE_WAY_S = 5.0  # a request that was passed on longer ago is lost

NO_KEY = bytes(32)  # the digest of the only line where requests need no key
_NUMBER = struct.Struct("=Q")
# First the number of the node's proxy, then the lines. A line: the key's digest; how often it was written, odd while it
# is; the length of the notice, and the notice; how many requests the proxy refused.
_VERSION_AT = len(NO_KEY)
_LENGTH_AT = _VERSION_AT + _NUMBER.size
_NOTICE_AT = _LENGTH_AT + _NUMBER.size
_REFUSED_AT = _NOTICE_AT + 2048  # more than enough for the longest names of keys
_LINE_BYTES = _REFUSED_AT + _NUMBER.size


@dataclass(frozen=True, slots=True)
class Notice:
    """How many more requests of a key a coordinator accepts."""

    written_s: float  # by the monotonic clock, which processes of a node share
    requests: int
    reached: Reached  # the bound that one more would exceed
    retry_s: float  # in which a refused request should come again
    apart_s: float = 0.0  # so much later each further one should come
    proxy: int = 0  # the random number of the node's proxy
    seen: int = 0  # the number of the last request that the coordinator got from it
    refused: int = 0  # requests that the proxy had refused, as far as the coordinator knew


_decoder = msgspec.msgpack.Decoder(Notice)


class AdmissionBoard:
    """One line for each key, named by its digest, with its notice."""

    def __init__(self, memory: mmap.mmap, offer: SharedOffer) -> None:
        self._memory, self._offer = memory, offer
        lines = range(_NUMBER.size, len(memory) - _LINE_BYTES + 1, _LINE_BYTES)
        self._lines = {memory[start : start + len(NO_KEY)]: start for start in lines}

    @staticmethod
    def create(digests: Sequence[bytes]) -> "AdmissionBoard | None":
        """Create a board for keys with these digests; (): requests need no key. None: not on this system."""
        digests = digests or (NO_KEY,)
        created = create(_NUMBER.size + _LINE_BYTES * len(digests))
        if created is None:
            return None
        memory, offer = created
        for index, digest in enumerate(digests):
            start = _NUMBER.size + index * _LINE_BYTES
            memory[start : start + len(NO_KEY)] = digest
        return AdmissionBoard(memory, offer)

    @staticmethod
    def attach(name: str) -> "AdmissionBoard | None":
        """Open another process's board. None: it is out of reach, or the name is none."""
        try:
            fields = dict(zip(SharedOffer.__struct_fields__, name.split("."), strict=False))
            offer = msgspec.convert(fields, SharedOffer, strict=False)
        except msgspec.ValidationError:
            return None
        memory = attach(offer)
        return None if memory is None else AdmissionBoard(memory, offer)

    @property
    def name(self) -> str:
        return ".".join(map(str, msgspec.structs.astuple(self._offer)))

    @property
    def is_alive(self) -> bool:
        return self._offer.is_within_reach

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key. Otherwise `NO_KEY` has the only line."""
        return NO_KEY not in self._lines

    @property
    def proxy(self) -> int:
        """The random number of the node's proxy; 0: it has not read the board yet."""
        return int(_NUMBER.unpack_from(self._memory)[0])

    @proxy.setter
    def proxy(self, number: int) -> None:
        _NUMBER.pack_into(self._memory, 0, number)

    def knows(self, key: bytes) -> bool:
        return key in self._lines

    def write(self, key: bytes, notice: Notice) -> None:
        """Replace a notice. For the creator."""
        line = self._lines[key]
        (version,) = _NUMBER.unpack_from(self._memory, line + _VERSION_AT)
        _NUMBER.pack_into(self._memory, line + _VERSION_AT, version + 1)
        encoded = msgspec.msgpack.encode(notice)
        assert len(encoded) <= _REFUSED_AT - _NOTICE_AT
        _NUMBER.pack_into(self._memory, line + _LENGTH_AT, len(encoded))
        self._memory[line + _NOTICE_AT : line + _NOTICE_AT + len(encoded)] = encoded
        _NUMBER.pack_into(self._memory, line + _VERSION_AT, version + 2)

    def read(self, key: bytes) -> Notice | None:
        """Return a notice; None: there is none yet, it is being written, or the key is unknown."""
        line = self._lines.get(key)
        if line is None:
            return None
        copied = self._memory[line : line + _REFUSED_AT]
        (version,) = _NUMBER.unpack_from(copied, _VERSION_AT)
        if not version or version % 2 or _NUMBER.unpack_from(self._memory, line + _VERSION_AT) != (version,):
            return None
        (length,) = _NUMBER.unpack_from(copied, _LENGTH_AT)
        return _decoder.decode(copied[_NOTICE_AT : _NOTICE_AT + length])

    def refused(self, key: bytes) -> int:
        return int(_NUMBER.unpack_from(self._memory, self._lines[key] + _REFUSED_AT)[0])

    def count_refused(self, key: bytes) -> None:
        """Count a refused request. For the node's only proxy."""
        _NUMBER.pack_into(self._memory, self._lines[key] + _REFUSED_AT, self.refused(key) + 1)


class Doorkeeper:
    """Passes on as many requests of a key as the boards of the node's coordinators allow."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._proxy = 1 + secrets.randbelow(10**9 - 1)  # processes of two nodes may have the same id
        self._boards: dict[str, AdmissionBoard] = {}
        self._strange: set[str] = set()  # names of boards on other nodes, which are out of reach
        self._passed: dict[bytes, tuple[int, float]] = {}  # by key: how many requests, and when the last one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        passed = f"{self._proxy}:"
        if is_generating(scope):
            key = self._key_of(headers)
            error = self._refusal(key) if "origin" not in headers else None  # browsers need more headers
            if error is not None:
                response = error_response(error)
                response.headers["X-Request-Id"] = request_id_of(headers)
                await response(scope, receive, send)
                return
            passed += str(self._count_passed(key))
        await self._app(with_header(scope, PASSED, passed), receive, on_start(send, self._take_board))

    def _key_of(self, headers: Headers) -> bytes:
        """Return the digest of the request's key on boards. Where nobody needs a key, all requests have the same."""
        needs_key = any(board.needs_key for board in self._boards.values())
        return secret_digest(authorization_of(headers)) if needs_key else NO_KEY

    def _refusal(self, key: bytes) -> OverloadedError | None:
        """Return the refusal, if no coordinator of this node accepts another request of the key."""
        notices: list[tuple[Notice, AdmissionBoard]] = []
        for name, board in list(self._boards.items()):
            notice = board.read(key)
            if not board.is_alive:
                del self._boards[name]
            elif notice is None or time.monotonic() - notice.written_s >= STALE_S:
                return None
            else:
                notices.append((notice, board))
        if not notices or sum(notice.requests for notice, _ in notices) > self._on_the_way(key, notices):
            return None
        notice, board = min(notices, key=lambda item: max(item[0].retry_s, item[0].reached.wait_s))
        since = board.refused(key) - notice.refused
        board.count_refused(key)
        return notice.reached.error(notice.retry_s + since * notice.apart_s)

    def _on_the_way(self, key: bytes, notices: list[tuple[Notice, AdmissionBoard]]) -> int:
        """Return how many requests of the key were passed on, but not yet seen by a coordinator."""
        number, passed_s = self._passed.get(key, (0, 0.0))
        seen = max((notice.seen for notice, _ in notices if notice.proxy == self._proxy), default=0)
        return max(0, number - seen) if time.monotonic() - passed_s <= _ON_THE_WAY_S else 0

    def _count_passed(self, key: bytes) -> int:
        """Number a request that is passed on; 0 if no board has its key."""
        if not any(board.knows(key) for board in self._boards.values()):
            return 0
        number = self._passed.get(key, (0, 0.0))[0] + 1
        self._passed[key] = number, time.monotonic()
        return number

    def _take_board(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        if BOARD in headers:
            self._meet(headers[BOARD])
            del headers[BOARD]

    def _meet(self, name: str) -> None:
        if name in self._boards or name in self._strange:
            return
        board = AdmissionBoard.attach(name)
        if board is None:
            self._strange.add(name)
        else:
            board.proxy = self._proxy
            self._boards[name] = board
