"""The chat template of an endpoint: its checkpoint's or a configured one, with a place for tools."""

from pathlib import Path
from typing import Literal

import jinja2
from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError
from deployments.apis.formats import response_template, tool_format

ToolPlace = Literal["model", "built-in"]
_TOOLS = Path(__file__).with_name("tools.jinja")
_BUILT_IN = "{%- set tools_role = "
REFUSALS = jinja2.TemplateError, TypeError, ValueError, RecursionError  # of a template that gets a conversation
_SYSTEM, _USER = {"role": "system", "content": "Say 71."}, {"role": "user", "content": "Say 72."}


def set_chat_template(tokenizer: PreTrainedTokenizerBase, given: str | None) -> None:
    """Give a tokenizer the template of a configuration, if there is one, and a place for tools if it has none.

    Raises ConfigError if the template is no valid one.
    """
    if given is not None:
        tokenizer.chat_template = given
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return
    try:
        role = "system" if _shows(tokenizer, _SYSTEM, _USER) else "user"
    except jinja2.TemplateSyntaxError as error:
        if given is None:  # chats are answered with the reason
            return
        raise ConfigError(f"line {error.lineno}: {error.message}") from error
    if tools_of(tokenizer) is None:
        tools = _TOOLS.read_text(encoding="utf-8")
        tokenizer.chat_template = f'{_BUILT_IN}"{role}" -%}}\n{tools}{template}'


def tools_of(tokenizer: PreTrainedTokenizerBase) -> ToolPlace | None:
    """Return whose place for tools a tokenizer's chat template has; None: none, or in a form that we don't read."""
    if str(tokenizer.chat_template).startswith(_BUILT_IN):
        return "built-in"
    fields = getattr(response_template(tokenizer), "fields", ())
    return "model" if tool_format(tokenizer.chat_template) is not None or "tool_calls" in fields else None


def _shows(tokenizer: PreTrainedTokenizerBase, *turns: dict[str, str]) -> bool:
    """Whether the template shows the first message of a conversation; some refuse those of the system, or drop them.

    Raises jinja2.TemplateSyntaxError if it is no template.
    """
    try:
        return turns[0]["content"] in str(tokenizer.apply_chat_template(list(turns), tokenize=False))
    except jinja2.TemplateSyntaxError:
        raise
    except REFUSALS:
        return False
