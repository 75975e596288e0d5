"""How a model writes reasoning and tool calls, recognised by its chat template, and the events of a parsed answer."""

import secrets
from dataclasses import dataclass, field
from typing import Literal

ToolFormat = Literal["hermes", "mistral", "llama"]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

# Texts leave out special tokens, so only the JSON of Mistral's and Llama's formats remains.
_SIGNS: dict[str, ToolFormat] = {
    "<tool_call>": "hermes",  # NousResearch's Hermes, Qwen 2.5 and 3: JSON between tags
    "[TOOL_CALLS]": "mistral",  # a list of JSON objects
    "<|python_tag|>": "llama",  # Llama 3: an object, or several with ";" between
    '"parameters": dictionary of argument name': "llama",
}


def tool_format(chat_template: object) -> ToolFormat | None:
    """Format of tool calls in a chat template, of those that stream; None: the template has none of them."""
    text = str(chat_template or "")
    return next((name for sign, name in _SIGNS.items() if sign in text), None)


def has_think_tags(chat_template: object) -> bool:
    """Whether the model reasons between `<think>` tags before its answer."""
    return THINK_OPEN in str(chat_template or "")


@dataclass(frozen=True, slots=True)
class CallStart:
    """Begin of a call. Its arguments follow as `Arguments` events."""

    name: str
    # Mistral requires nine letters and digits.
    id: str = field(default_factory=lambda: f"call{secrets.token_hex(3)[:5]}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Next piece of the JSON arguments of the latest call, as the model wrote it."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Next piece of what the model writes before its answer."""

    text: str


AnswerEvent = str | Reasoning | CallStart | Arguments  # str: content
