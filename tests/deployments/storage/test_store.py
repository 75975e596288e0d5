"""What a store of responses keeps, for whom, how much and for how long, in memory, in a file and in PostgreSQL."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from decoding.errors import UnavailableError
from deployments.configuration.responses import ResponsesConfig
from deployments.storage.database import Database
from deployments.storage.store import ResponseStore, Turn, make_store

_Result = TypeVar("_Result")
DAY_S = 86_400.0


class Clock:
    """A clock that is set by hand."""

    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def finish(work: Coroutine[Any, Any, _Result]) -> _Result:
    return asyncio.run(work)


def turn(name: str, previous: str | None = None, *, size: int = 100) -> Turn:
    message = {"id": f"msg_{name}", "type": "message", "role": "user", "content": "x" * size}
    return Turn({"id": name, "previous_response_id": previous, "output": []}, [message])


Open = Callable[..., ResponseStore]


@pytest.fixture
def open_store(clock: Clock) -> Iterator[Open]:
    with ExitStack() as stack:

        def opened(location: str, *, max_bytes: int = 2**22) -> ResponseStore:
            store = ResponseStore(location, ttl_s=DAY_S, max_bytes=max_bytes, clock=clock)
            stack.callback(store.close)
            return store

        yield opened


@pytest.fixture(params=["memory", "file", pytest.param("postgres", marks=pytest.mark.slow)])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "file":
            return f"sqlite:///{tmp_path / 'responses.db'}"
        case "postgres":
            return str(request.getfixturevalue("postgres"))
    return "memory"


@pytest.fixture
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL of the test's own, which listens to a socket in a folder."""
    pytest.importorskip("psycopg")
    if shutil.which("initdb") is None:
        pytest.skip("there is no PostgreSQL")
    folder = Path("/tmp") / f"consort-postgres-{os.getpid()}"  # a socket's path must be short, its folder readable
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    listen = f"-c listen_addresses= -c unix_socket_directories={folder}"
    subprocess.run([*user, "mkdir", "-p", str(folder)], check=True)
    try:
        subprocess.run([*user, "initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "consort"], check=True)
        start = ["pg_ctl", "-D", f"{folder}/data", "-o", listen, "-l", f"{folder}/log", "-w", "start"]
        subprocess.run([*user, *start], check=True)
        yield f"postgresql:///postgres?host={folder}&user=consort"
        subprocess.run([*user, "pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop"], check=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_conversation_comes_back_up_to_a_turn_for_its_owner_alone(location: str, open_store: Open) -> None:
    store = open_store(location)
    turns = [turn("a"), turn("b", "a"), turn("c", "b"), turn("d", "b")]
    for each in turns:
        finish(store.put(each, owner="eve"))
    assert finish(store.chain("d", owner="eve")) == [turns[0], turns[1], turns[3]]
    assert finish(store.chain("a", owner="eve")) == turns[:1]
    assert finish(store.chain("d", owner="bob")) == finish(store.chain("e", owner="eve")) == []
    assert not finish(store.delete("a", owner="bob"))
    finish(store.put(turn("a"), owner="bob"))  # an id can't be taken over
    assert finish(store.chain("a", owner="bob")) == []
    assert finish(store.delete("a", owner="eve"))
    assert not finish(store.delete("a", owner="eve"))
    assert finish(store.chain("d", owner="eve")) == [turns[1], turns[3]]


def test_what_was_not_continued_for_long_expires(location: str, open_store: Open, clock: Clock) -> None:
    store = open_store(location)
    for each in (turn("a"), turn("b", "a"), turn("c")):
        finish(store.put(each, owner="eve"))
    clock.now_s += 0.6 * DAY_S
    assert len(finish(store.chain("b", owner="eve", continues=True))) == 2
    clock.now_s += 0.6 * DAY_S
    assert finish(store.chain("c", owner="eve")) == []
    assert not finish(store.delete("c", owner="eve"))
    assert len(finish(store.chain("b", owner="eve"))) == 2
    finish(store.tend())
    assert (store.turns, store.bytes) == (2, 2 * 4096)


def test_the_least_recently_continued_go_first(location: str, open_store: Open, clock: Clock) -> None:
    store = open_store(location, max_bytes=10 * 4096)
    for number in range(10):
        finish(store.put(turn(str(number)), owner="eve"))
        clock.now_s += 60
    finish(store.chain("0", owner="eve", continues=True))
    finish(store.chain("1", owner="eve"))  # reading is no use
    clock.now_s += 60
    finish(store.put(turn("10"), owner="eve"))
    there = [number for number in range(11) if finish(store.chain(str(number), owner="eve"))]
    assert there == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (store.turns, store.bytes) == (9, 9 * 4096)
    with pytest.raises(UnavailableError, match=r"larger than responses\.max_bytes"):
        finish(store.put(turn("x", size=50_000), owner="eve"))


def test_a_thousand_conversations_take_no_more_memory_than_they_may(open_store: Open) -> None:
    most = 2**20
    store = open_store("memory", max_bytes=most)
    for number in range(1000):
        finish(store.put(turn(str(number), size=number % 50 * 200), owner="eve"))
        assert store.bytes <= most
        pages, page = store._database.transact(lambda run: (run("PRAGMA page_count"), run("PRAGMA page_size")))
        assert pages[0][0] * page[0][0] < 1.1 * most  # all that the database holds, with its indices
    assert 100 < store.turns < 256
    assert finish(store.chain("999", owner="eve"))


def test_a_file_outlives_the_server_and_is_its_owners(tmp_path: Path, open_store: Open) -> None:
    path = tmp_path / "responses.db"
    first = open_store(f"sqlite:///{path}")
    finish(first.put(turn("a"), owner="eve"))
    finish(first.put(turn("b", "a"), owner="eve"))
    second = open_store(f"sqlite:///{path}")  # while the first is still there, as at a change of coordinators
    assert finish(second.chain("b", owner="eve", continues=True)) == [turn("a"), turn("b", "a")]
    finish(second.put(turn("c", "b"), owner="eve"))
    assert finish(second.delete("b", owner="eve"))
    assert finish(first.chain("c", owner="eve")) == [turn("c", "b")]
    finish(second.tend())
    assert second.turns == 2
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


def test_a_database_that_fails_is_left_alone_for_a_while(tmp_path: Path, open_store: Open) -> None:
    folder = tmp_path / "away"
    store = open_store(f"sqlite:///{folder}/responses.db")
    for reason in ("can't be reached", "just failed"):
        with pytest.raises(UnavailableError, match=reason):
            finish(store.put(turn("a"), owner="eve"))
    folder.mkdir()
    store._database._next_try_s = 0.0
    finish(store.put(turn("a"), owner="eve"))
    assert finish(store.chain("a", owner="eve"))


@pytest.mark.slow
def test_a_database_that_starts_anew_loses_no_turn(postgres: str, open_store: Open) -> None:
    store, other = open_store(postgres), open_store(postgres)
    finish(store.put(turn("a"), owner="eve"))
    admin = Database(postgres, ())
    admin.transact(
        lambda run: run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()")
    )
    admin.close()
    finish(store.put(turn("b", "a"), owner="eve"))
    assert len(finish(other.chain("b", owner="eve"))) == 2


@pytest.mark.parametrize("store", ["memory", "sqlite:////tmp/x.db"])
def test_coordinators_that_serve_together_need_a_store_that_they_share(store: str) -> None:
    with pytest.raises(ValueError, match=r"responses.store: .* 2 coordinators .* postgresql://"):
        make_store(ResponsesConfig(store=store), 2)
    assert make_store(ResponsesConfig(store=store), 1) is not None
    assert make_store(ResponsesConfig(), 2) is None
    assert make_store(ResponsesConfig(), 1) is not None
    assert ResponsesConfig(store="postgresql://host/name").for_coordinators(2) == "postgresql://host/name"
