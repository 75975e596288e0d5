"""TCP relays that can be cut, frozen and delayed, one for each replica."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Literal

State = Literal["open", "cut", "frozen"]

_CHUNK_BYTES = 65536


class Relay:
    """Relays data between `port` and another port of this machine, in both directions."""

    def __init__(self, loop: asyncio.AbstractEventLoop, upstream: int) -> None:
        """upstream: the port of the replica."""
        self._loop, self._upstream = loop, upstream
        self._passing = asyncio.Event()
        self._passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.state: State = "open"
        self.port = 0

    async def start(self) -> None:
        """Start to listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def set(self, state: State, *, delay_s: float = 0.0) -> None:
        """Set the state. cut: connections are aborted. frozen: they stay, but carry nothing. Thread-safe."""
        self._loop.call_soon_threadsafe(self._set, state, delay_s)

    async def close(self) -> None:
        """Abort all connections and stop listening."""
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
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:  # the replica is dead
            writer.transport.abort()
            return
        self._writers |= {writer, upstream_writer}
        try:
            await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))
        finally:
            self._writers -= {writer, upstream_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward every chunk `delay_s` after its arrival. Several chunks can be on their way."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(waiting, writer))
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                waiting.put_nowait((self._loop.time() + self.delay_s, chunk))
        except OSError:
            pass  # the other side's connection ends as after an orderly close
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
    """An event loop in its own thread for all relays; a context manager."""

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

    def __exit__(self, *error: object) -> None:
        for relay in list(self._open):
            self.close(relay)
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def open(self, upstream: int) -> Relay:
        """Open a relay to a port. Any thread but the relays' own can call this."""
        relay = Relay(self._loop, upstream)
        asyncio.run_coroutine_threadsafe(relay.start(), self._loop).result()
        self._open.add(relay)
        return relay

    def close(self, relay: Relay) -> None:
        """End a relay and its connections."""
        self._open.discard(relay)
        asyncio.run_coroutine_threadsafe(relay.close(), self._loop).result()
