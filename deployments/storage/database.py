"""Transactions on SQLite, in memory or a file, and on PostgreSQL, with the same statements."""

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeVar

from decoding.errors import UnavailableError
from deployments.configuration.responses import SQLITE

_Result = TypeVar("_Result")
_BUSY_S = 5.0  # for another process to end its transaction
_CONNECT_S = 3
_PAUSE_S = 5.0  # after a connection failed; nobody waits for the next one meanwhile
_POSTGRES = {  # an answer waits for its transaction
    "connect_timeout": _CONNECT_S,
    "tcp_user_timeout": int(_BUSY_S * 1000),
    "options": f"-c statement_timeout={int(_BUSY_S * 1000)} -c lock_timeout={int(_BUSY_S * 1000)}",
}
_logger = logging.getLogger(__name__)


class Cursor(Protocol):
    """What a statement has found."""

    def fetchall(self) -> Sequence[Any]: ...


class Connection(Protocol):
    """What drivers of databases have in common."""

    def execute(self, statement: Any, values: Any = ..., /) -> Cursor: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


Execute = Callable[..., Sequence[Any]]  # a statement with a ? for each of the values that follow; returns rows


class Database:
    """A database for use by one thread at a time. Its tables are made on the first connection."""

    def __init__(self, store: str, tables: Sequence[str]) -> None:
        """store: `memory`, `sqlite:///PATH` or a `postgresql://` URL. tables: statements that can be repeated."""
        self._store, self._tables = store, tables
        self._is_sqlite = store == "memory" or store.startswith(SQLITE)
        self._connection: Connection | None = None
        self._errors: tuple[type[Exception], ...] = (OSError, sqlite3.Error)
        if not self._is_sqlite:
            self._errors = (OSError, import_module("psycopg").Error)
        self._next_try_s = 0.0  # by the monotonic clock

    def transact(self, work: Callable[[Execute], _Result]) -> _Result:
        """Do work, all of it or nothing; it may be done twice, if a connection breaks.

        Raises UnavailableError if the database can't be used now.
        """
        if time.monotonic() < self._next_try_s:
            raise UnavailableError("the store of responses has just failed; ask again")
        try:
            try:
                return self._transact(work)
            except self._errors:
                if self._connection is not None:  # the transaction failed, not the connection
                    raise
                return self._transact(work)  # the database may have started anew
        except self._errors as error:
            if self._connection is None:
                self._next_try_s = time.monotonic() + _PAUSE_S
            _logger.warning("the store of responses failed, by %s: %s", type(error).__name__, error)
            raise UnavailableError("the store of responses can't be reached; the server's log says why") from error

    def close(self) -> None:
        """End the connection, until the next transaction."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _transact(self, work: Callable[[Execute], _Result]) -> _Result:
        connection = self._connection = self._connection or self._connect()
        try:
            result = work(lambda statement, *values: self._execute(connection, statement, *values))
            connection.commit()
        except BaseException:
            self._undo(connection)
            raise
        return result

    def _undo(self, connection: Connection) -> None:
        """Roll back, or forget a connection that is broken."""
        try:
            connection.rollback()
        except self._errors:
            self._connection = None

    def _connect(self) -> Connection:
        if self._is_sqlite:
            connection = _open_sqlite(self._store.removeprefix(SQLITE))
        else:
            connection = import_module("psycopg").connect(self._store, **_POSTGRES)
        for statement in self._tables:
            connection.execute(statement)
        connection.commit()
        return connection

    def _execute(self, connection: Connection, statement: str, *values: object) -> Sequence[Any]:
        cursor: Any = connection.execute(statement if self._is_sqlite else statement.replace("?", "%s"), values)
        return () if cursor.description is None else cursor.fetchall()


def _open_sqlite(path: str) -> Connection:
    """Open a file that only its owner can read, or if the path is `memory` a database in memory."""
    if path != "memory":
        os.close(os.open(path, os.O_CREAT, 0o600))
    name = ":memory:" if path == "memory" else path
    connection = sqlite3.connect(name, timeout=_BUSY_S, check_same_thread=False)
    for setting in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
        connection.execute(f"PRAGMA {setting}")
    return connection
