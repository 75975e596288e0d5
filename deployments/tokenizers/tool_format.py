"""How a model writes tool calls, recognised by its chat template, and the events of an answer that is parsed."""

import secrets
from dataclasses import dataclass, field
from typing import Literal

ToolFormat = Literal["hermes", "mistral", "llama"]

# Texts leave out special tokens, so only the JSON of Mistral's and Llama's formats remains.
_SIGNS: dict[str, ToolFormat] = {
    "<tool_call>": "hermes",  # NousResearch's Hermes, Qwen 2.5 and 3: JSON between tags
    "[TOOL_CALLS]": "mistral",  # a list of JSON objects
    "<|python_tag|>": "llama",  # Llama 3: an object, or several with ";" between
    '"parameters": dictionary of argument name': "llama",
}


def tool_format(chat_template: object) -> ToolFormat | None:
    """Format of tool calls in a chat template; None: the template has no tools."""
    text = str(chat_template or "")
    return next((name for sign, name in _SIGNS.items() if sign in text), None)


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


AnswerEvent = str | CallStart | Arguments  # str: content
