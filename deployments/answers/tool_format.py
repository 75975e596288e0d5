"""How a model writes its calls of tools, which follows from its chat template. Reads them out of texts."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ToolFormat = Literal["hermes", "mistral", "llama"]

# Special tokens are not part of texts, so of Mistral's and Llama's forms only the JSON is left.
_SIGNS: dict[str, ToolFormat] = {
    "<tool_call>": "hermes",  # NousResearch's Hermes, Qwen 2.5 and 3: JSON between tags
    "[TOOL_CALLS]": "mistral",  # a list of JSON objects
    "<|python_tag|>": "llama",  # Llama 3: an object, or several with ";" between
    '"parameters": dictionary of argument name': "llama",
}


def tool_format(chat_template: object) -> ToolFormat | None:
    """The form of calls in a template; None: it has no tools."""
    text = str(chat_template or "")
    return next((form for sign, form in _SIGNS.items() if sign in text), None)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model wants made."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call{secrets.token_hex(3)[:5]}")  # nine letters and digits, for Mistral's


def read_calls(text: str) -> list[Call]:
    """All calls in JSON: an object, a list, or several with ";" between; nothing if any of it is something else."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at] in " \t\r\n;":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        for one in value if isinstance(value, list) else [value]:
            call = _call(one)
            if call is None:
                return []
            calls.append(call)
    return calls


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(value["name"], arguments)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: Sequence[Call] = ()
