"""One HTTP request on its own connection, which the client can break at any moment. Uses no client library."""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Exchange:
    """A response as its client saw it. Times are on the monotonic clock."""

    began_s: float
    ended_s: float
    first_s: float | None  # arrival of the body's first byte
    status: int  # 0: the connection broke before a status arrived
    retry_after: str | None
    body: bytes

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    @property
    def is_whole(self) -> bool:
        """Whether it is a stream that came to its end."""
        return self.status == HTTPStatus.OK and b"data: [DONE]" in self.body


async def ask(url: str, path: str, body: Mapping[str, object]) -> Exchange:
    """POST and read the response to its end."""
    began_s = time.monotonic()
    reader, writer = await _connect(url)
    try:
        writer.write(_request(url, path, body))
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        rest, first_s = [], None
        while piece := await reader.read(_READ_BYTES):
            first_s = first_s or time.monotonic()
            rest.append(piece)
    except (OSError, asyncio.IncompleteReadError):
        return Exchange(began_s, time.monotonic(), None, 0, None, b"")
    finally:
        writer.close()
    status, retry_after = _parse(head)
    return Exchange(began_s, time.monotonic(), first_s, status, retry_after, b"".join(rest))


async def ask_and_disconnect(
    url: str, path: str, body: Mapping[str, object], *, after_s: float, rng: random.Random
) -> None:
    """POST a request or a part of it, and disconnect after `after_s` seconds, with a close or a reset."""
    try:
        reader, writer = await _connect(url)
        request = _request(url, path, body)
        writer.write(request if rng.random() < 0.9 else request[: rng.randrange(1, len(request))])
        with suppress(TimeoutError):
            await asyncio.wait_for(_drain(reader), after_s)
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
    except OSError:
        return


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(_READ_BYTES):
        pass


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)


def _request(url: str, path: str, body: Mapping[str, object]) -> bytes:
    content = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        f"Host: {urlsplit(url).netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    )
    return "\r\n".join([*lines, "", ""]).encode() + content


def _parse(head: bytes) -> tuple[int, str | None]:
    """Return the status, and Retry-After."""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers.get("retry-after")
