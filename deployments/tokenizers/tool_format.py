"""How a model writes its calls of tools, which follows from its chat template; what is told of a call as it comes."""

import secrets
from dataclasses import dataclass, field
from typing import Literal

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
class CallStart:
    """The model calls a function. Its arguments come in pieces after this."""

    name: str
    id: str = field(default_factory=lambda: f"call{secrets.token_hex(3)[:5]}")  # nine letters and digits, for Mistral's


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the arguments of the call that began last: JSON, as the model wrote it."""

    text: str


AnswerEvent = str | CallStart | Arguments  # a text is content
