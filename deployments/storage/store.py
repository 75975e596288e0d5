"""Turns of conversations by their ids: bounded, for a time, and each for one API key alone."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from decoding.errors import UnavailableError
from deployments.configuration.responses import ResponsesConfig
from deployments.storage.database import Database, Execute

_PAGE = 4096  # bytes of a page of SQLite's
_ROW = 256  # bytes of a row beside its document, those of the indices included
_MARGIN = 0.9  # share of the bound that is left when room is made
_TOUCH_S = 10.0  # how exactly it is known when a turn was last continued
_TEND_S = 60.0
_TABLES = (
    "CREATE TABLE IF NOT EXISTS consort_responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, "
    "used DOUBLE PRECISION NOT NULL, bytes BIGINT NOT NULL, document TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS consort_responses_used ON consort_responses (used)",
)
_PUT = "INSERT INTO consort_responses VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
_MINE = "id = ? AND owner = ? AND used >= ?"
_CHAIN = (  # a turn, the one before it, and so on
    "WITH RECURSIVE chain AS (SELECT id, owner, previous, used, document, 0 AS depth FROM consort_responses "
    f"WHERE {_MINE} UNION ALL "
    "SELECT turn.id, turn.owner, turn.previous, turn.used, turn.document, depth + 1 FROM consort_responses AS turn "
    "JOIN chain ON turn.id = chain.previous AND turn.owner = chain.owner) "
    "SELECT id, used, document FROM chain ORDER BY depth DESC"
)
_TURN = f"SELECT id, used, document FROM consort_responses WHERE {_MINE}"
_TOUCH = "UPDATE consort_responses SET used = ? WHERE id = ?"
_DELETE = f"DELETE FROM consort_responses WHERE {_MINE} RETURNING bytes"
_EXPIRE = "DELETE FROM consort_responses WHERE used < ?"
_SIZE = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM consort_responses"
_EVICT = (  # the least recently used, up to so many bytes
    "DELETE FROM consort_responses WHERE id IN (SELECT id FROM "
    "(SELECT id, bytes, SUM(bytes) OVER (ORDER BY used, id) AS upto FROM consort_responses) AS turn "
    "WHERE upto - bytes < ?)"
)
_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)


class Turn(msgspec.Struct, frozen=True):
    """One request to /v1/responses with its answer. Items are OpenAI's, as JSON."""

    response: dict[str, Any]  # as it was answered
    input: list[dict[str, Any]]  # the request's own items, each with an id
    lead: list[int] = []  # token ids that the prompt ended with
    tokens: list[int] = []  # of the answer

    @property
    def response_id(self) -> str:
        return str(self.response["id"])

    @property
    def previous_id(self) -> str | None:
        """Id of the turn that this one continues; None: it begins its conversation."""
        previous: str | None = self.response["previous_response_id"]
        return previous

    @property
    def output(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.response["output"]
        return items


def response_id_of(item_id: str) -> str:
    """Return the id of the response that an item of an output belongs to: it begins the item's own."""
    return f"resp_{item_id.partition('_')[2][:24]}"


def make_store(config: ResponsesConfig, coordinators: int) -> "ResponseStore | None":
    """Return the store of one of so many coordinators; None: nothing is kept.

    Raises ConfigError if they can't share the one that is configured.
    """
    store = config.for_coordinators(coordinators)
    return None if store == "none" else ResponseStore(store, ttl_s=config.ttl_s, max_bytes=config.max_bytes)


class ResponseStore:
    """What `previous_response_id` and GET /v1/responses find. Its methods belong to one event loop.

    All raise UnavailableError while the database can't be used. Another key's turn is none.
    """

    def __init__(self, store: str, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """
        store: `memory`, `sqlite:///PATH` or a `postgresql://` URL.
        ttl_s: for which a turn is kept after it was made or last continued.
        max_bytes: of all turns, each counted in whole pages; the least recently continued go first.
        clock: seconds since 1970.
        """
        self.turns = self.bytes = 0  # as last counted; others may use the same database
        self._ttl_s, self._max_bytes, self._clock = ttl_s, max_bytes, clock
        self._database = Database(store, _TABLES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storing")

    async def put(self, turn: Turn, *, owner: str) -> None:
        def insert(execute: Execute) -> int:
            document = msgspec.json.encode(turn)
            size = -(-(len(document) + _ROW) // _PAGE) * _PAGE
            if size > self._max_bytes:
                raise UnavailableError(f"a response of {size} bytes is larger than responses.max_bytes")
            execute(_PUT, turn.response_id, owner, turn.previous_id, self._clock(), size, document.decode())
            return size

        size = await self._transact(insert)
        self.turns, self.bytes = self.turns + 1, self.bytes + size
        if self.bytes > self._max_bytes:
            await self.tend()

    async def chain(self, response_id: str, *, owner: str, continues: bool = False) -> list[Turn]:
        """Return a conversation up to a turn, oldest first; without its beginning, if that is gone; []: no such turn.

        continues: the turns count as used now.
        """
        return await self._read(_CHAIN, [response_id], owner, continues=continues)

    async def turns_of(self, response_ids: Collection[str], *, owner: str) -> list[Turn]:
        """Return those of the turns that there are. They count as used now."""
        return await self._read(_TURN, response_ids, owner, continues=True)

    async def _read(self, statement: str, response_ids: Collection[str], owner: str, *, continues: bool) -> list[Turn]:
        now_s = self._clock()

        def select(execute: Execute) -> Sequence[str]:
            rows = [row for each in response_ids for row in execute(statement, each, owner, now_s - self._ttl_s)]
            for turn_id, used_s, _ in rows:
                if continues and used_s < now_s - _TOUCH_S:
                    execute(_TOUCH, now_s, turn_id)
            return [document for _, _, document in rows]

        documents = await self._transact(select)
        return [msgspec.json.decode(document, type=Turn) for document in documents]

    async def delete(self, response_id: str, *, owner: str) -> bool:
        """Delete a turn; return whether there was one."""
        bound_s = self._clock() - self._ttl_s
        rows = await self._transact(lambda execute: execute(_DELETE, response_id, owner, bound_s))
        self.turns, self.bytes = self.turns - len(rows), self.bytes - sum(size for (size,) in rows)
        return bool(rows)

    async def tend(self) -> None:
        """Delete what is too old or too much, and count the rest."""

        def work(execute: Execute) -> tuple[int, int]:
            execute(_EXPIRE, self._clock() - self._ttl_s)
            ((turns, size),) = execute(_SIZE)
            if size > self._max_bytes:
                execute(_EVICT, size - int(self._max_bytes * _MARGIN))
                ((turns, size),) = execute(_SIZE)
            return turns, int(size)

        self.turns, self.bytes = await self._transact(work)

    async def run(self) -> None:
        """Tend to the turns for ever."""
        while True:
            try:
                await self.tend()
            except UnavailableError:
                _logger.debug("left the store of responses alone")  # the failure was logged
            await asyncio.sleep(min(_TEND_S, self._ttl_s))

    def close(self) -> None:
        """End the connection once what is under way has ended."""
        self._thread.shutdown()
        self._database.close()

    async def _transact(self, work: Callable[[Execute], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._database.transact, work)
