"""Fields that make or shorten a prompt, and the bodies of /compress, /tokenize and /detokenize."""

from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from decoding.prompt_positions import PromptPositions
from deployments.fields.conversation import Conversation, Message, Offered, Tool
from deployments.fields.strict import StrictModel, Text, wrong_field
from deployments.fields.types import EndpointName, Items, TokenId, Words

_MOST_EXAMPLES = 256
_METHODS = ("perplexity", "sentence", "attention")


def _known_method(method: str) -> str:
    if method not in _METHODS:
        raise PydanticCustomError("method", "should be perplexity, sentence or attention")
    return method


class Example(StrictModel):
    """A few-shot example: the template's variables, and the answer to them."""

    variables: dict[str, Any]
    answer: Text


class TemplateFields(StrictModel):
    """A named prompt template and what fills it."""

    template: Text | None = Field(None, description="A prompt template's name, as GET /v1/templates lists them.")
    variables: dict[str, Any] | None = Field(None, description="Values of the template's variables.")
    examples: Annotated[Items[Example], Field(max_length=_MOST_EXAMPLES)] | None = Field(
        None, description="Few-shot examples for the template: `variables` and the `answer` to them."
    )

    def template_conditions(self) -> list[tuple[bool, str, str]]:
        """Conditions on the fields: whether each holds, the field that is wrong if not, and the problem."""
        needs = "needs a template"
        return [
            (self.variables is None or self.template is not None, "variables", needs),
            (self.examples is None or self.template is not None, "examples", needs),
        ]


class PromptCompression(StrictModel):
    """How to shorten a prompt."""

    always_strict: ClassVar[bool] = True

    method: Annotated[Text, AfterValidator(_known_method), Field(json_schema_extra={"enum": list(_METHODS)})] = Field(
        "perplexity",
        description="`perplexity`: drop paragraphs, then single tokens; `sentence`: drop whole sentences; `attention`: "
        "drop chunks, and keep the others' positions.",
    )
    rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Share to keep of what may be shortened; this or `target_tokens`."
    )
    target_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="About how many tokens to keep in all, what may not be shortened included."
    )
    question: Text | None = Field(
        None, description="What is relevant to it stays. By default the last paragraph; empty: no question."
    )
    keep_last: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Tokens before the question, or the end, that stay."
    )
    force_tokens: Annotated[list[Words], Field(max_length=256)] | None = Field(
        None, description="Tokens with these texts stay, and so do sentences with one."
    )
    compress_code: bool | None = Field(None, description="true: fenced code may be shortened, too.")
    return_prompt: bool | None = Field(None, description="true: answer with the `compressed_prompt`.")

    @model_validator(mode="after")
    def _one_length(self) -> "PromptCompression":
        if (self.rate is None) == (self.target_tokens is None):
            raise wrong_field("rate", "should be set, or else target_tokens, but not both")
        return self


class CompressionFields(StrictModel):
    """Compression of a request's prompt."""

    prompt_compression: PromptCompression | None = Field(
        None, description="Shorten the prompt by a small model; off by default."
    )


class ShortenedPrompt(NamedTuple):
    """A prompt in tokens that keep their positions in the whole one; None: it is whole."""

    tokens: list[int]
    positions: PromptPositions | None
    text: str


class Compressed(NamedTuple):
    """What compression did to a request's prompts."""

    original_tokens: int
    prompts: list[ShortenedPrompt] | None = None  # if their tokens keep their positions


class _TextOrConversation(StrictModel):
    model: EndpointName = ""
    prompt: Text | None = Field(None, description="A text; this or `messages`.")
    messages: Items[Message] | None = Field(None, description="A conversation; this or `prompt`.")

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong_field("prompt", "should be set, or else messages, but not both")
        return self


class CompressRequest(_TextOrConversation, PromptCompression):
    """Body of POST /compress."""

    @model_validator(mode="after")
    def _leaves_a_text(self) -> Self:
        if self.method == "attention":
            raise wrong_field("method", "should be perplexity or sentence: attention leaves tokens, not a text")
        return self


class CompressedPrompt(BaseModel):
    """Response of /compress. Lengths are in the endpoint's tokens, of texts alone."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    original_tokens: int
    compressed_tokens: int
    ratio: float  # compressed_tokens / original_tokens


class TokenizeRequest(_TextOrConversation):
    """Body of POST /tokenize: a text, or a conversation for the chat template."""

    add_special_tokens: bool | None = Field(None, description="Of a text: false leaves out what the model begins with.")
    return_token_strs: bool | None = Field(None, description="Also answer with the tokens as texts.")
    add_generation_prompt: bool | None = Field(None, description="Of a conversation: as in chat.")
    continue_final_message: bool | None = Field(None, description="The same.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="The same.")
    tools: Offered[Tool] | None = Field(None, description="The same.")

    def to_conversation(self) -> Conversation:
        return Conversation(
            self.messages or (),
            self.chat_template_kwargs or {},
            self.add_generation_prompt is not False,
            bool(self.continue_final_message),
            self.tools or (),
        )


class Tokenization(BaseModel):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: EndpointName = ""
    tokens: Items[TokenId] = Field(description="Token ids.")


class Detokenization(BaseModel):
    """Response of /detokenize: the text with special tokens."""

    prompt: str
