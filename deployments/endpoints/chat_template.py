"""The chat template of an endpoint: its checkpoint's or a configured one, with a place for tools."""

from contextlib import suppress
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
_USER = {"role": "user", "content": "b"}


def set_chat_template(tokenizer: PreTrainedTokenizerBase, given: str | None) -> None:
    """Give a tokenizer the template of a configuration, if there is one, and a place for tools if it has none.

    Raises:
        ConfigError: the template is no valid one.
    """
    if given is not None:
        tokenizer.chat_template = given
        try:
            _render(tokenizer, [_USER])
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"line {error.lineno}: {error.message}") from error
        except REFUSALS:
            pass  # it may want other messages
    template = tokenizer.chat_template
    if not isinstance(template, str) or tools_of(tokenizer) is not None:
        return
    tools = _TOOLS.read_text(encoding="utf-8")
    for role in ("system", "user"):  # some templates refuse messages of the system
        tokenizer.chat_template = f'{_BUILT_IN}"{role}" -%}}\n{tools}{template}'
        with suppress(*REFUSALS):
            _render(tokenizer, [{"role": "system", "content": "a"}, _USER])
            return


def tools_of(tokenizer: PreTrainedTokenizerBase) -> ToolPlace | None:
    """Return whose place for tools a tokenizer's chat template has; None: none, or in a form that we don't read."""
    if str(tokenizer.chat_template).startswith(_BUILT_IN):
        return "built-in"
    fields = getattr(response_template(tokenizer), "fields", ())
    return "model" if tool_format(tokenizer.chat_template) is not None or "tool_calls" in fields else None


def _render(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]]) -> None:
    tokenizer.apply_chat_template(turns, tokenize=False)
