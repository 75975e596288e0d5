"""Links that can be cut, frozen and slowed: a TCP relay in front of each replica. Knows bytes, and no messages."""

import asyncio
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Literal

State = Literal["open", "cut", "frozen"]

_CHUNK_BYTES = 65536


class Relay:
    """Passes on what arrives at `port` to another one of this machine, in both directions."""

    def __init__(self, loop: asyncio.AbstractEventLoop, upstream: int) -> None:
        """upstream: the port to pass on to."""
        self._loop, self._upstream = loop, upstream
        self._passing = asyncio.Event()
        self._passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.state: State = "open"
        self.port = 0

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def set(self, state: State, *, delay_s: float = 0.0) -> None:
        """cut: connections break, new ones are closed. frozen: they stay, and nothing passes. Any thread may call."""
        self._loop.call_soon_threadsafe(self._set, state, delay_s)

    async def close(self) -> None:
        """End for good."""
        self._set("cut", 0.0)
        self._server.close()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _set(self, state: State, delay_s: float) -> None:
        self.state, self.delay_s = state, delay_s
        if state == "frozen":
            self._passing.clear()
        else:
            self._passing.set()
        if state == "cut":
            for writer in self._writers:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.state == "cut":
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:  # the replica is dead
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        finally:
            self._writers -= {writer, back}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Every chunk leaves `delay_s` after it came, however many are on their way."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(waiting, writer))
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                waiting.put_nowait((self._loop.time() + self.delay_s, chunk))
        except OSError:
            pass  # the other side is told in the same way as after an orderly end
        finally:
            waiting.put_nowait((0.0, b""))
            await sending

    async def _send(self, waiting: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
        while True:
            due_s, chunk = await waiting.get()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            await self._passing.wait()
            if not chunk or writer.is_closing():
                break
            writer.write(chunk)
        writer.transport.abort()


class Relays:
    """An event loop in a thread of its own for all relays. To be used with `with`."""

    def __enter__(self) -> "Relays":
        self._open: set[Relay] = set()
        running: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()

        async def run() -> None:
            running.set_result(asyncio.get_running_loop())
            await self._stop.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), name="relays", daemon=True)
        self._thread.start()
        self._loop = running.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for relay in list(self._open):
            self.close(relay)
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def open(self, upstream: int) -> Relay:
        """A relay to the port; any thread but the relays' own may ask."""
        relay = Relay(self._loop, upstream)
        asyncio.run_coroutine_threadsafe(relay.start(), self._loop).result()
        self._open.add(relay)
        return relay

    def close(self, relay: Relay) -> None:
        """End a relay and its connections."""
        self._open.discard(relay)
        asyncio.run_coroutine_threadsafe(relay.close(), self._loop).result()
