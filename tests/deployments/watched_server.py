"""A server over the fake coordinator that measures how long its event loop was blocked.

Arguments: the port; the secret of an API key, if requests need one.
"""

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import psutil  # type: ignore[import-untyped]
import uvicorn
from fastapi import FastAPI

from actors.coordinator.request import Delta, Request
from deployments.admission.bounds import Limits
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from deployments.replicas.environment import share_interpreter
from tests.deployments.fake_coordinator import FakeCoordinator
from tests.deployments.scripted import TEMPLATE

CONTEXT = 40_000  # tokens
_TICK_S = 0.002


class ThreadedCoordinator(FakeCoordinator):
    """Answers from its own thread, as the real coordinator does."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1)

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        self._thread.submit(self._answer, request, sink)

    def _answer(self, request: Request, sink: Callable[[Delta], None]) -> None:
        super().submit(request, sink)
        self.requests.clear()


class Watch:
    """Measures how long the event loop was blocked, and the process's memory.

    A gap counts for no more than the processor time that this process had in it, so other processes don't matter.
    """

    def __init__(self) -> None:
        self.stall_s, self.most_bytes = 0.0, 0
        self._process = psutil.Process()

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            before = time.perf_counter(), time.process_time()
            await asyncio.sleep(_TICK_S)
            gaps = time.perf_counter() - before[0], time.process_time() - before[1]
            self.stall_s = max(self.stall_s, min(gaps) - _TICK_S)
            self.most_bytes = max(self.most_bytes, self._process.memory_info().rss)

    async def read(self) -> dict[str, float]:
        """Return the longest gap in seconds and the most memory in bytes since the last call, and what is open now."""
        await asyncio.sleep(5 * _TICK_S)  # so that a gap that has just ended is measured
        open_files, tasks = self._process.num_fds(), len(asyncio.all_tasks())
        watched = {"stall_s": self.stall_s, "bytes": self.most_bytes, "open_files": open_files, "tasks": tasks}
        self.stall_s, self.most_bytes = 0.0, 0
        return watched


def main(port: int, *secrets: str) -> None:
    """Serve until ended."""
    share_interpreter()
    config, coordinator, watch = load_config(TINY_CONFIG), ThreadedCoordinator(), Watch()
    for model in config.models.values():
        model.max_length = CONTEXT
    endpoints, fake = load_endpoints(config), coordinator
    endpoints["consort"].encoder.tokenizer.chat_template = TEMPLATE
    endpoints["consort"].token_decoder.tool_format = "hermes"
    service: Any = Service(endpoints, fake, limits=Limits(max_requests=256))  # type: ignore[arg-type]
    api = make_api(service, keys=KeyRing(ApiKey("key", digest_of(secret)) for secret in secrets))

    @asynccontextmanager
    async def watched(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(watch.run())
        yield
        task.cancel()

    api.router.lifespan_context = watched
    api.add_api_route("/watch", watch.read)
    gc.collect()
    gc.freeze()  # as the application does
    uvicorn.run(api, port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
