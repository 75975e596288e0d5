"""Fields that clients send by habit. Values without effect are ignored; others are refused with a reason."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from deployments.requests.fields import Items, at_most, only, without_effect
from deployments.validation.strict import StrictModel, Text, wrong_field

_NEWER = "send tools and tool_choice"
_MOST_METADATA = 64  # entries; OpenAI takes 16
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {  # by name: values that change nothing, what to send instead
    "max_new_tokens": ((), "send max_tokens"),
    "n_predict": ((-1,), "send max_tokens"),
    "truncate_prompt_tokens": ((-1,), "send a prompt that fits"),
    "stop_regex": (([], ""), "send stop"),
    "logits_processors": (([],), "send logit_bias, bad_words or structured_outputs"),
    "structural_tag": ((), "send structured_outputs"),
    "guided_json_object": ((False,), 'send response_format: {"type": "json_object"}'),
    "guided_whitespace_pattern": ((), "blanks can't be chosen"),
}


def check_others(fields: Mapping[str, Any]) -> None:
    """Refuse fields of other servers that would change the answer. What only tunes them is ignored."""
    for name, (harmless, advice) in _REFUSED.items():
        if fields.get(name) is not None and not any(fields[name] == value for value in harmless):
            raise wrong_field(name, f"is not supported and would change the answer; {advice}")


class CompatibilityFields(StrictModel):
    """Fields without effect in completions and chat."""

    user: Text | None = Field(None, description="Accepted for compatibility, and not used.")
    metadata: Annotated[dict[Text, Text], at_most(_MOST_METADATA)] | None = Field(None, description="The same.")
    safety_identifier: str | None = Field(None, description="The same.")
    prompt_cache_key: str | None = Field(None, description="The same.")
    service_tier: str | None = Field(None, description="The same.")
    store: Annotated[Any, without_effect(False)] = Field(None, description="Without effect: answers are not stored.")
    skip_special_tokens: (
        Annotated[bool, only(True, why="texts have no special tokens; `return_token_details` shows them")] | None
    ) = Field(None, description="Only true.")
    spaces_between_special_tokens: (
        Annotated[bool, only(True, why="texts have no special tokens; `return_token_details` shows them")] | None
    ) = Field(None, description="Only true.")


class ChatCompatibilityFields(StrictModel):
    """Fields without effect in chat alone."""

    functions: Annotated[list[Any], only([], why=_NEWER)] | None = Field(
        None, description="Only an empty list; `tools` has replaced it."
    )
    function_call: Annotated[Any, only("none", "auto", why=_NEWER)] = Field(
        None, description="Only `none` or `auto`; `tool_choice` has replaced it."
    )
    verbosity: Annotated[Any, without_effect("medium")] = Field(None, description="Without effect.")
    modalities: Annotated[Items[str], only(["text"], why="answers are text")] | None = Field(
        None, description='Only `["text"]`.'
    )
    audio: Annotated[Any, only(why="answers are text")] = Field(None, description="Only null.")
    prediction: Annotated[Any, without_effect()] = Field(None, description="Without effect: drafts come from drafters.")
    web_search_options: Annotated[Any, only(why="there is no web search")] = Field(None, description="Only null.")
