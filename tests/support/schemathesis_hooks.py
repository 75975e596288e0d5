"""Hooks of `make fuzz-http`: repair most generated requests, so that many are answered."""

import json
from typing import Any

import schemathesis  # type: ignore[import-not-found]

_KEPT = {"model", "prompt", "messages", "input", "tokens", "replicas"}
_MOST_OTHERS = 4
_VOCAB = 2048
_ITEM_FIELDS = {
    "message": {"role": "user", "content": "x"},
    "function_call": {"call_id": "a", "name": "f", "arguments": "{}"},
    "function_call_output": {"call_id": "a", "output": "x"},
}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Request an existing endpoint or model, and keep at most four optional fields."""
    if not isinstance(body, dict):
        return body
    count = len(json.dumps(body, default=str)) % (_MOST_OTHERS + 1)
    others = [name for name in body if name not in _KEPT][count:]
    kept = {name: _whole(value) for name, value in body.items() if name not in others}
    if count < _MOST_OTHERS:
        kept = {name: _REPAIRS.get(name, _same)(value) for name, value in kept.items()}
    return kept | {"model": "target" if "replicas" in body else "consort"}


def _same(value: Any) -> Any:
    return value


def _whole(value: Any) -> Any:
    """Turn 1.0 into 1: JSON schemas take it for an integer, the server does not."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole(item) for item in value]
        case dict():
            return {name: _whole(item) for name, item in value.items()}
    return value


def _tokens(value: Any) -> Any:
    """Map token ids into the model's vocabulary."""
    if isinstance(value, list):
        return [_tokens(item) for item in value]
    return abs(value) % _VOCAB if isinstance(value, int) and not isinstance(value, bool) else value


def _messages(value: Any) -> Any:
    """Remove fields that don't fit a message's role, and add required ones."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    turns = []
    for message in value:
        role = message.get("role")
        wrong = {"assistant": {"tool_call_id"}, "tool": {"tool_calls"}}.get(str(role), {"tool_calls", "tool_call_id"})
        turn = {"content": "x", "role": "user"} | {name: field for name, field in message.items() if name not in wrong}
        turns.append(
            turn | ({"tool_call_id": "a"} if role == "tool" else {}) | ({} if turn["content"] else {"content": "x"})
        )
    return turns


def _items(value: Any) -> Any:
    """Keep the fields that fit an item's type, and add required ones."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    items = []
    for item in value:
        kind = str(item.get("type") or "message")
        fields = _ITEM_FIELDS.get(kind, {})
        given = {name: field for name, field in item.items() if name in fields and field is not None}
        items.append({"type": kind, **fields, **given})
    return items


_REPAIRS = {"prompt": _tokens, "tokens": _tokens, "messages": _messages, "input": _items}
