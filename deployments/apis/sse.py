"""Server-sent events as text."""

from typing import Any

import msgspec


def event(data: str, *, name: str | None = None) -> str:
    """Format an event. data: one line of JSON. name: optional event type."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def typed_event(data: dict[str, Any]) -> str:
    """Format an event of /v1/responses, whose name is the `type` in its data."""
    return event(msgspec.json.encode(data).decode(), name=data["type"])
