"""Several asynchronous streams as one. Knows nothing of what they carry."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Each item as it comes, with the number of its stream. The first error ends all; so does leaving early."""
    told: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def follow(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    told.put_nowait((number, item))
        except Exception as error:
            told.put_nowait(error)
        else:
            told.put_nowait(None)

    tasks = [asyncio.create_task(follow(number, stream)) for number, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            item = await told.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
