"""What Serve's proxy refuses by itself, because a coordinator's board says so."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from actors.coordinator.request import Delta, Request
from deployments.admission.bounds import Limits
from deployments.admission.key_bounds import KeyRates, Reached, Use
from deployments.configuration.api_keys import ANYBODY, ApiKey, KeyRing, digest_of
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.announcer import Announcer
from deployments.http.doorkeeper import BOARD, NO_KEY, PASSED, AdmissionBoard, Doorkeeper, Notice
from deployments.http.middleware import Drain
from deployments.http.routes import Surroundings, make_api
from tests.deployments.fake_coordinator import FakeCoordinator, answer
from tests.deployments.http.test_overload import Families
from tests.support import virtual_time

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such memory")

SLOTS = 4
FRESH_S = 1e9  # no clock goes that far
BODY = json.dumps({"model": "consort", "prompt": "x", "max_tokens": 8, "seed": 1}).encode()
FULL = Reached("max_queue_wait_s", "the request would wait for about 7 s; http.max_queue_wait_s allows 2 s.")


class Endless(FakeCoordinator):
    """Begins requests and never ends them."""

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        self.requests.append(request)


@dataclass
class Coordinators:
    """The application behind the doorkeeper, and which requests came to it."""

    app: Any
    reached: list[str] = field(default_factory=list)
    slow: asyncio.Event | None = None  # requests wait for it on the way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(scope["path"])
        if self.slow is not None:
            await self.slow.wait()
        await self.app(scope, receive, send)


@dataclass
class Reply:
    """A response."""

    status: int
    headers: Headers
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


async def ask(app: Any, path: str = "/v1/completions", **headers: str) -> Reply:
    """Send a request, and wait for the whole response."""
    start: Message = {}
    parts = list[bytes]()
    messages = iter([{"type": "http.request", "body": BODY, "more_body": False}])

    async def receive() -> Message:
        message = next(messages, None)
        return message if message is not None else await asyncio.Future()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        parts.append(message.get("body", b""))

    given = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    raw = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    await app({**scope, "headers": raw, "http_version": "1.1"}, receive, send)
    return Reply(start["status"], Headers(raw=start["headers"]), b"".join(parts))


@asynccontextmanager
async def asking(app: Any, count: int, **headers: str) -> AsyncIterator[list[asyncio.Task[Reply]]]:
    """Ask so many at once, and hang up in the end."""
    tasks = [asyncio.ensure_future(ask(app, **headers)) for _ in range(count)]
    await asyncio.sleep(0.5)  # for all to come as far as they come, and several notices
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def statuses(tasks: list[asyncio.Task[Reply]]) -> list[int]:
    return [task.result().status for task in tasks if task.done()]


@dataclass
class World:
    """A coordinator with four slots and two more, and a proxy before it."""

    service: Service
    drain: Drain
    coordinators: Coordinators
    door: Doorkeeper
    began_s: float


class Stepping(FakeCoordinator):
    """Answers in a second, token by token, with six requests at once."""

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        deltas, loop = answer(request), asyncio.get_running_loop()
        for index, delta in enumerate(deltas, start=1):
            loop.call_later(index / len(deltas), sink, delta)


def in_world(
    endpoints: dict[str, ServedEndpoint],
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[World], Coroutine[Any, Any, None]],
    *keys: ApiKey,
    introduce: bool = True,
    kind: type[FakeCoordinator] = Endless,
) -> None:
    """Run the test where no time passes while there is something to do.

    introduce: the board to the proxy. kind: of the coordinator.
    """

    async def run() -> None:
        coordinator: Any = kind()
        coordinator.slots = SLOTS
        limits = Limits(running={"target": SLOTS}, max_queue_wait_s=None)
        service = Service(endpoints, coordinator, limits=limits)
        drain, ring = Drain(), KeyRing(keys)
        board = AdmissionBoard.create(ring.digests)
        assert board is not None
        announcer = Announcer(service, ring, drain, board)
        coordinators = Coordinators(
            make_api(
                service, keys=ring, surroundings=Surroundings(drain=drain, announcer=announcer), allowed_hosts=[""]
            )
        )
        began_s = asyncio.get_running_loop().time()
        world = World(service, drain, coordinators, Doorkeeper(coordinators), began_s)
        if introduce:
            await ask(world.door, "/health")
            coordinators.reached.clear()
        await test(world)

    virtual_time.run(run(), monkeypatch)


def refused(world: World) -> dict[str, float]:
    """Refusals by key, of the metrics."""
    lines = generate_latest(Families(world.service)).decode().splitlines()
    lines = [line for line in lines if line.startswith("consort:requests_refused_total{")]
    return {line.split('key="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def test_a_full_coordinator_is_not_asked(endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        async with asking(world.door, 40):
            passed = len(world.coordinators.reached)
            reply = await ask(world.door, X_Request_Id="mine")
            assert (reply.status, reply.headers["x-request-id"]) == (429, "mine")
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.error["code"] == "rate_limit_exceeded"
            assert "http.max_queue_wait_s allows half as long as an answer takes" in reply.error["message"]
            async with asking(world.door, 100) as tasks:
                assert statuses(tasks) == [429] * 100
            assert len(world.coordinators.reached) == passed
            assert (await ask(world.door, "/v1/messages")).error["type"] == "rate_limit_error"
            assert (await ask(world.door, "/consort/v1/completions")).status == 429
            assert len(world.coordinators.reached) == passed
            await ask(world.door, "/tokenize")
            assert world.coordinators.reached[-1] == "/tokenize"
            await asyncio.sleep(0.5)
            assert refused(world) == {"anybody": 40 - 2 * SLOTS - 4 + 103}

    in_world(endpoints, monkeypatch, test)


@pytest.mark.parametrize("introduce", [True, False])
def test_of_many_at_once_only_those_that_fit_are_passed_on(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch, introduce: bool
) -> None:
    """Also while all of them are still on the way, if the coordinator has said once how many it would take."""

    async def test(world: World) -> None:
        async with asking(world.door, 1):
            passed = len(world.coordinators.reached)
            world.coordinators.slow = asyncio.Event()
            async with asking(world.door, 300) as tasks:
                if introduce:
                    assert len(world.coordinators.reached) - passed == 2 * (SLOTS + 2) - 1
                    assert statuses(tasks) == [429] * (300 - 2 * (SLOTS + 2) + 1)
                else:  # the proxy has never had a response of this coordinator
                    assert len(world.coordinators.reached) - passed == 300
                world.coordinators.slow.set()

    in_world(endpoints, monkeypatch, test, introduce=introduce)


def test_a_crowd_that_obeys_takes_no_time_from_those_who_are_answered(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty times as many clients as run at once: the coordinator sees little of them, and no slot is empty."""
    seconds, answered = 60, [0]

    async def client(world: World) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < world.began_s + seconds:
            reply = await ask(world.door)
            answered[-1] += reply.status == 200
            if reply.status == 429:
                await asyncio.sleep(int(reply.headers["retry-after"]))

    async def test(world: World) -> None:
        await asyncio.gather(*(client(world) for _ in range(6)))
        answered.append(0)
        world.began_s = asyncio.get_running_loop().time()
        world.coordinators.reached.clear()
        await asyncio.gather(*(client(world) for _ in range(120)))
        assert len(world.coordinators.reached) < 1.05 * answered[1]

    in_world(endpoints, monkeypatch, test, kind=Stepping)
    assert answered[1] > 0.95 * answered[0]


def test_room_that_comes_is_announced(endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        async with asking(world.door, 2 * (SLOTS + 2)):
            assert (await ask(world.door)).status == 429
            first = min(world.service.admission._tickets)
            world.service.admission.cancel(first)
            async with asking(world.door, 0):
                passed = len(world.coordinators.reached)
            async with asking(world.door, 3) as tasks:
                assert len(world.coordinators.reached) == passed + 1
                assert statuses(tasks) == [429, 429]

    in_world(endpoints, monkeypatch, test)


def test_it_announces_in_serves_event_loop(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handles of timers that are due at once say no time."""
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(virtual_time, "run", lambda coroutine, monkeypatch: uvloop.run(coroutine))

    async def test(world: World) -> None:
        async with asking(world.door, 40):
            while (await ask(world.door)).status != 429 or not refused(world):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    in_world(endpoints, monkeypatch, test)


def test_keys_are_refused_one_by_one(endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """One key's backlog closes the door to that key alone; strangers are the coordinator's to refuse."""
    keys = [ApiKey(name, digest_of(name)) for name in ("alice", "bob")] + [
        ApiKey("eve", digest_of("eve"), max_requests=1)
    ]

    async def test(world: World) -> None:
        async with asking(world.door, 40, authorization="Bearer alice"):
            passed = len(world.coordinators.reached)
            assert (await ask(world.door, x_api_key="alice")).status == 429
            assert len(world.coordinators.reached) == passed
            assert (await ask(world.door, authorization="Bearer nobody")).status == 401
            assert (await ask(world.door)).status == 401
            assert len(world.coordinators.reached) == passed + 2
            async with asking(world.door, 1, authorization="Bearer bob") as tasks:
                assert (len(world.coordinators.reached), statuses(tasks)) == (passed + 3, [])
            async with asking(world.door, 1, authorization="Bearer eve") as tasks:
                passed = len(world.coordinators.reached)
                reply = await ask(world.door, authorization="Bearer eve")
                assert "http.api_keys.eve.max_requests" in reply.error["message"]
                assert len(world.coordinators.reached) == passed
        await asyncio.sleep(0.5)
        assert set(refused(world)) == {"alice", "eve"}

    in_world(endpoints, monkeypatch, test, *keys)


def test_other_nodes_proxies_hide_nothing_from_this_nodes(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They number nothing, because they know no board."""

    async def test(world: World) -> None:
        for _ in range(60):
            assert (await ask(world.door)).status == 200
            assert (await ask(world.coordinators, **{PASSED: "4711:0"})).status == 200

    in_world(endpoints, monkeypatch, test, kind=Stepping)


@pytest.mark.parametrize(
    ("status", "path", "headers"),
    [
        (413, "/v1/completions", {"content_length": str(2**40)}),
        (404, "/nobody/v1/completions", {}),
        (421, "/v1/completions", {"host": "elsewhere"}),
    ],
)
def test_what_fails_for_other_reasons_takes_no_room(
    endpoints: dict[str, ServedEndpoint],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    path: str,
    headers: dict[str, str],
) -> None:
    async def test(world: World) -> None:
        async with asking(world.door, 1):
            most = 2 * (SLOTS + 2) - 1
            assert [(await ask(world.door, path, **headers)).status for _ in range(most)] == [status] * most
            async with asking(world.door, 0):
                pass
            async with asking(world.door, most) as tasks:
                assert statuses(tasks) == []

    in_world(endpoints, monkeypatch, test)


def test_a_key_over_its_minute_is_told_when_it_ends(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ApiKey("eve", digest_of("eve"), requests_per_minute=2)

    async def test(world: World) -> None:
        async with asking(world.door, 2, authorization="Bearer eve"):
            passed = len(world.coordinators.reached)
            told = int((await ask(world.door, authorization="Bearer eve")).headers["retry-after"])
            assert len(world.coordinators.reached) == passed
            assert told == int((await ask(world.coordinators, authorization="Bearer eve")).headers["retry-after"]) > 10

    in_world(endpoints, monkeypatch, test, key)


def test_browsers_and_a_coordinator_that_drains_answer_for_themselves(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World) -> None:
        async with asking(world.door, 40):
            passed = len(world.coordinators.reached)
            reply = await ask(world.door, origin="http://localhost:3000")
            assert (reply.status, len(world.coordinators.reached)) == (429, passed + 1)
            assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
            world.drain.has_begun = True
            await asyncio.sleep(10)  # the last notices are old
            assert (await ask(world.door)).status == 503

    in_world(endpoints, monkeypatch, test)


def test_headers_between_proxy_and_coordinator_stay_there(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(Headers(scope=scope).getlist(PASSED))
        await send({"type": "http.response.start", "status": 200, "headers": [(BOARD.encode(), b"1.2.nonsense.3")]})
        await send({"type": "http.response.body", "body": b""})

    async def test() -> None:
        reply = await ask(Doorkeeper(application), **{PASSED: "1:1"})
        assert BOARD not in reply.headers
        await ask(Doorkeeper(application))
        assert all(value.endswith(":0") for value in seen)
        assert len({"1:1", f"{os.getpid()}:0", *seen}) == 4  # proxies on two nodes may have the same pid

    asyncio.run(test())


def door_with(board: AdmissionBoard) -> tuple[Doorkeeper, list[str]]:
    """A doorkeeper that knows a board, and the paths that it passes on."""
    reached: list[str] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(BOARD.encode(), board.name.encode())]})
        await send({"type": "http.response.body", "body": b""})

    return Doorkeeper(application), reached


def test_old_notices_are_not_believed_and_boards_of_the_dead_forgotten() -> None:
    program = """
from deployments.http.doorkeeper import *
import sys
board = AdmissionBoard.create(())
print(board.name, flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    board = AdmissionBoard.attach(name)
    assert board is not None
    assert board.is_alive
    door, reached = door_with(board)

    async def test() -> None:
        await ask(door, "/health")
        board.write(NO_KEY, Notice(FRESH_S, 0, FULL, 7.0))
        assert (await ask(door)).status == 429
        board.write(NO_KEY, Notice(time.monotonic() - 10, 0, FULL, 7.0))
        assert (await ask(door)).status == 200  # its coordinator lives, and may have room
        board.write(NO_KEY, Notice(FRESH_S, 0, FULL, 7.0))
        process.communicate("")
        assert not board.is_alive
        assert (await ask(door)).status == 200
        assert not door._boards
        assert reached == ["/health", "/v1/completions", "/v1/completions"]

    asyncio.run(test())
    assert AdmissionBoard.attach(name) is None


def test_where_one_of_two_coordinators_has_room_requests_are_passed_on() -> None:
    full, free = AdmissionBoard.create(()), AdmissionBoard.create(())
    assert full is not None
    assert free is not None
    door, _ = door_with(full)

    async def test() -> None:
        full.write(NO_KEY, Notice(FRESH_S, 0, FULL, 7.0))
        await ask(door, "/health")
        assert (await ask(door)).status == 429
        door._meet(free.name)
        assert (await ask(door)).status == 200  # nothing is written there yet
        free.write(NO_KEY, Notice(FRESH_S, 2, FULL, 7.0, 0.0, door._proxy, 1))
        assert [(await ask(door)).status for _ in range(4)] == [200, 200, 429, 429]

    asyncio.run(test())


def test_those_that_are_refused_together_come_again_one_by_one() -> None:
    """Also between two notices. Else they would come together again."""
    board = AdmissionBoard.create(())
    assert board is not None
    door, _ = door_with(board)

    async def test() -> None:
        board.write(NO_KEY, Notice(FRESH_S, 0, FULL, 4.0, 0.5))
        await ask(door, "/health")
        waits_s = [int((await ask(door)).headers["retry-after"]) for _ in range(40)]
        assert all(4 + 0.5 * index <= wait_s <= 1.25 * (4 + 0.5 * index) + 1 for index, wait_s in enumerate(waits_s))
        board.write(NO_KEY, Notice(FRESH_S, 0, FULL, 4.0, 0.5, refused=40))
        assert int((await ask(door)).headers["retry-after"]) <= 6

    asyncio.run(test())


def test_requests_of_another_node_do_not_hide_those_of_this_one(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those that have arrived would count as on the way, and an idle server would refuse."""

    async def test(world: World) -> None:
        its_own = AdmissionBoard.create(())
        assert its_own is not None
        remote = Doorkeeper(world.coordinators)
        remote._strange.update(world.door._boards)
        remote._meet(its_own.name)
        for _ in range(3 * SLOTS):
            replies = await asyncio.gather(ask(world.door), ask(world.door), ask(remote))
            assert [reply.status for reply in replies] == [200] * 3

    in_world(endpoints, monkeypatch, test, kind=Stepping)


def test_requests_that_are_read_take_room(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else as many again would be passed on while bodies are parsed and prompts become tokens."""

    async def test(world: World) -> None:
        async def prepare(*_: object, **__: object) -> list[Request]:
            return await asyncio.Future()

        async with asking(world.door, 1):
            monkeypatch.setattr(world.service, "prepare", prepare)
            async with asking(world.door, 40), asking(world.door, 40) as tasks:
                assert statuses(tasks) == [429] * 40
                assert len(world.coordinators.reached) == 2 * (SLOTS + 2)

    in_world(endpoints, monkeypatch, test)


def test_what_fails_while_it_is_read_takes_no_room(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World) -> None:
        for _ in range(40):
            assert (await ask(world.door, "/v1/chat/completions")).status == 400  # without messages
        room = world.service.room(ANYBODY)
        assert room is not None
        assert room.requests >= SLOTS
        assert (await ask(world.door)).status == 200

    in_world(endpoints, monkeypatch, test, kind=Stepping)


def test_a_notice_is_what_was_written() -> None:
    board = AdmissionBoard.create([digest_of("a"), digest_of("b")])
    assert board is not None
    other = AdmissionBoard.attach(board.name)
    assert other is not None
    rates = KeyRates(ApiKey("x" * 200, tokens_per_minute=10**12))  # as long as names may be
    rates.take(Use(tokens=10**12), 0.0)
    reached = rates.reached(Use(tokens=10**9), 0.0)
    assert reached is not None
    notice = Notice(12.5, 3, reached, 4.25, 0.5, 77, 12, 3)
    board.write(digest_of("b"), notice)
    assert other.read(digest_of("a")) is other.read(digest_of("c")) is None
    read = other.read(digest_of("b"))
    assert read == notice
    board.write(digest_of("b"), replace(notice, reached=Reached("key_max_tokens", "zu viel: ü" * 100)))
    cut = other.read(digest_of("b"))
    assert cut is not None
    assert cut.reached.reason[:20] == "zu viel: üzu viel: ü"
    other.count_refused(digest_of("b"))
    other.count_refused(digest_of("b"))
    assert (board.refused(digest_of("a")), board.refused(digest_of("b"))) == (0, 2)
    assert AdmissionBoard.attach("nonsense") is AdmissionBoard.attach("1.2.3.x") is None
