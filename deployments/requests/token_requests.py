"""Bodies and responses of /tokenize and /detokenize, as in vLLM. Knows no tokenizers."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from deployments.requests.fields import Items, TokenId
from deployments.requests.message import Message
from deployments.requests.tool_fields import MOST_TOOLS, Tool
from deployments.validation.strict import StrictModel, Text, wrong_field


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize: a text, or a conversation for the chat template."""

    model: str = Field(description="An endpoint's name.")
    prompt: Text | None = Field(None, description="A text; this or `messages`.")
    messages: Items[Message] | None = Field(None, description="A conversation; this or `prompt`.")
    add_special_tokens: bool | None = Field(None, description="Of a text: false leaves out what the model begins with.")
    return_token_strs: bool | None = Field(None, description="Also answer with the tokens as texts.")
    add_generation_prompt: bool | None = Field(None, description="Of a conversation: as in chat.")
    continue_final_message: bool | None = Field(None, description="The same.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="The same.")
    tools: Annotated[Items[Tool], Field(max_length=MOST_TOOLS)] | None = Field(None, description="The same.")

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise wrong_field("prompt", "should be set, or else messages, but not both")
        return self


class Tokenization(BaseModel):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: str = Field(description="An endpoint's name.")
    tokens: Items[TokenId] = Field(description="Token ids.")


class Detokenization(BaseModel):
    """Response of /detokenize: the text with special tokens."""

    prompt: str
