"""Server-sent events as text."""

from typing import Any

import msgspec


def event(data: str, *, name: str | None = None) -> str:
    """One event. data: JSON in one line; name: its type, for clients that look at it."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def typed_event(data: dict[str, Any]) -> str:
    """An event whose name is its document's `type`, as in OpenAI's API of responses."""
    return event(msgspec.json.encode(data).decode(), name=data["type"])
