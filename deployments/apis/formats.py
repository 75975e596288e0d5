"""How models write reasoning and tool calls: by their chat templates, or response templates for transformers' parser.

A tokenizer may declare its own in tokenizer_config.json; formats.yaml has some for models that are older than these.
"""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from decoding.errors import ConfigError

_FILE = Path(__file__).with_suffix(".yaml")
ToolFormat = Literal["hermes", "mistral", "llama"]
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# Texts leave out special tokens, so only the JSON of Mistral's and Llama's formats remains.
_SIGNS: dict[str, ToolFormat] = {
    "<tool_call>": "hermes",  # NousResearch's Hermes, Qwen 2.5 and 3: JSON between tags
    "[TOOL_CALLS]": "mistral",  # a list of JSON objects
    "<|python_tag|>": "llama",  # Llama 3: an object, or several with ";" between
    '"parameters": dictionary of argument name': "llama",
}


def response_template(tokenizer: PreTrainedTokenizerBase) -> ResponseTemplate | None:
    """Template that the tokenizer declares, or the one for its chat template, or None; ConfigError if it is invalid."""
    declared = getattr(tokenizer, "response_template", None)
    if declared is not None:
        try:
            return load_response_template(declared)
        except ValueError as error:
            raise ConfigError(f"response_template in tokenizer_config.json: {error}") from error
    text = str(tokenizer.chat_template or "")
    known = next((entry["template"] for entry in _known() if entry["sign"] in text), None)
    return None if known is None else load_response_template(known)


def kept_tokens(template: ResponseTemplate, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the special tokens that the template looks for, which must stay in the text."""
    fields = template.fields.values()
    patterns = [anchor.pattern for field in fields for anchor in (field.open_re, field.close_re) if anchor is not None]
    wanted = "\n".join(patterns).replace("\\", "")
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return frozenset(number for name, number in special if name in wanted)


@cache
def _known() -> list[dict[str, Any]]:
    return list(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def tool_format(chat_template: object) -> ToolFormat | None:
    """Format of tool calls in a chat template, of those that stream; None: the template has none of them."""
    text = str(chat_template or "")
    return next((name for sign, name in _SIGNS.items() if sign in text), None)


def has_think_tags(chat_template: object) -> bool:
    """Whether the model reasons between `<think>` tags before its answer."""
    return THINK_OPEN in str(chat_template or "")
