"""Server-sent events as text."""

import json
from typing import Any


def event(data: str, *, name: str | None = None) -> str:
    """One event. data: JSON in one line; name: its type, for clients that look at it."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def typed_event(data: dict[str, Any]) -> str:
    """An event whose name is its document's `type`, as in OpenAI's API of responses."""
    return event(json.dumps(data, ensure_ascii=False), name=data["type"])
