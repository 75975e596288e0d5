"""For `make fuzz-http`: generated requests are made to fit together, mostly, so that many are answered."""

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
    """Asks for an endpoint, or a model, that is there; of the fields that may be left out keeps none to four."""
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
    """JSON schemas take 1.0 for an integer; the server does not."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole(one) for one in value]
        case dict():
            return {name: _whole(one) for name, one in value.items()}
    return value


def _tokens(value: Any) -> Any:
    """Token ids that are the model's."""
    if isinstance(value, list):
        return [_tokens(one) for one in value]
    return abs(value) % _VOCAB if isinstance(value, int) and not isinstance(value, bool) else value


def _messages(value: Any) -> Any:
    """What goes with each role."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return value
    turns = []
    for one in value:
        role = one.get("role")
        wrong = {"assistant": {"tool_call_id"}, "tool": {"tool_calls"}}.get(str(role), {"tool_calls", "tool_call_id"})
        turn = {"content": "x", "role": "user"} | {name: field for name, field in one.items() if name not in wrong}
        turns.append(
            turn | ({"tool_call_id": "a"} if role == "tool" else {}) | ({} if turn["content"] else {"content": "x"})
        )
    return turns


def _items(value: Any) -> Any:
    """What goes with each type."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return value
    items = []
    for one in value:
        kind = str(one.get("type") or "message")
        fields = _ITEM_FIELDS.get(kind, {})
        given = {name: field for name, field in one.items() if name in fields and field is not None}
        items.append({"type": kind, **fields, **given})
    return items


_REPAIRS = {"prompt": _tokens, "tokens": _tokens, "messages": _messages, "input": _items}
