"""Fields that clients send by habit. Values without effect are ignored; others are refused with a reason."""

from typing import Annotated, Any

from pydantic import Field

from deployments.requests.fields import Items, at_most, only, without_effect
from deployments.validation.strict import StrictModel, Text

_NEWER = "send tools and tool_choice"
_MOST_METADATA = 64  # entries; OpenAI takes 16


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
