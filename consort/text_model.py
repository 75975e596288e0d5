"""What `LLM` and `Client` share: Python's requests become bodies of the HTTP interface, and its documents answers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, Self

from decoding.errors import InvalidRequestError

Prompt = str | Sequence[int]  # a text, or token ids
Messages = Sequence[Mapping[str, Any]]  # of a conversation, as OpenAI's API has them, oldest first
Body = dict[str, Any]
Route = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How answers are sampled, where they end, and what is reported; fields of /v1/completions (docs/http.md).

    None is the default: the endpoint's, or else the interface's. Values are checked when a request is made.
    """

    max_tokens: int | None = None  # 16 for texts; as many as fit for conversations
    seed: int | None = None  # same seed, same text; None: drawn
    n: int | None = None  # answers per prompt
    best_of: int | None = None  # make so many, return the `n` most probable
    temperature: float | None = None  # 0: greedy; 1 by default
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[int, float] | None = None  # by token id
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_time: float | None = None  # seconds, after which the answer ends
    timeout_s: float | None = None  # seconds, after which the request fails
    logprobs: int | None = None  # most probable tokens to report per position of the answer
    prompt_logprobs: int | None = None  # the same for the prompt
    response_format: Mapping[str, Any] | None = None  # OpenAI's: JSON, or a JSON schema
    structured_outputs: Mapping[str, Any] | None = None  # vLLM's: json, regex, choice or grammar
    return_token_details: bool | None = None  # ids, texts and sources of tokens, in `Answer.document`
    use_beam_search: bool | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    force_words: Sequence[str | Sequence[str]] | None = None
    weights: Sequence[float] | None = None  # of an ensemble's members
    blend: Mapping[str, Any] | None = None  # how they are blended
    guidance_scale: float | None = None  # classifier-free guidance
    negative_prompt: Prompt | None = None  # what it leads away from
    formula: Mapping[str, Any] | None = None  # another weighted sum of log-probabilities
    speculate: bool | None = None  # False: plain decoding. Same text
    draft_length: int | None = None  # most draft tokens that a step verifies. Same text
    proposers: Sequence[str] | None = None  # that may draft. Same text
    verification: Literal["coupled", "rejection"] | None = None
    cache_salt: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON has them."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: _as_json(value) for name, value in given if value is not None}


def _as_json(value: object) -> object:
    match value:
        case Mapping():
            return {key: _as_json(entry) for key, entry in value.items()}
        case Sequence() if not isinstance(value, str | bytes):
            return [_as_json(entry) for entry in value]
        case _:
            return value


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers to a prompt."""

    text: str  # of a conversation: the content
    finish_reason: str  # stop, length or tool_calls
    stop_reason: str | int | None = None  # the stop string or token, or the criterion
    reasoning: str | None = None  # what came before the content
    tool_calls: Sequence[ToolCall] = ()
    logprobs: Mapping[str, Any] | None = None  # as in the HTTP interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a prompt or a conversation; `text` and `tool_calls` are the first choice's."""

    choices: Sequence[Choice]
    prompt_tokens: int
    completion_tokens: int  # of all choices
    seed: int  # asks for the same text again
    drafted: int  # draft tokens that were verified
    accepted: int
    document: Mapping[str, Any] = field(repr=False)  # all that the HTTP interface says

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        return self.choices[0].tool_calls

    @staticmethod
    def read(document: Mapping[str, Any]) -> "Answer":
        return Answer(
            choices=[_read_choice(choice) for choice in document["choices"]],
            prompt_tokens=document["usage"]["prompt_tokens"],
            completion_tokens=document["usage"]["completion_tokens"],
            seed=document["seed"],
            drafted=document["speculation"]["drafted"],
            accepted=document["speculation"]["accepted"],
            document=document,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next piece of a streamed answer. The last one of a choice has `finish_reason`."""

    text: str
    index: int = 0  # of the choice
    reasoning: str | None = None
    finish_reason: str | None = None
    document: Mapping[str, Any] = field(repr=False)  # the chunk of the HTTP interface

    @staticmethod
    def read(document: Mapping[str, Any]) -> "Piece":
        (choice,) = document["choices"]
        delta = choice.get("delta", {})
        return Piece(
            text=choice.get("text") or delta.get("content") or "",
            index=choice["index"],
            reasoning=delta.get("reasoning_content"),
            finish_reason=choice.get("finish_reason"),
            document=document,
        )


def _read_choice(choice: Mapping[str, Any]) -> Choice:
    message = choice.get("message", {})
    calls = message.get("tool_calls") or ()
    return Choice(
        text=choice.get("text") or message.get("content") or "",
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        reasoning=message.get("reasoning_content"),
        tool_calls=[ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls],
        logprobs=choice.get("logprobs"),
    )


DEFAULTS = SamplingParams()
NO_EMBEDDINGS = (
    "embed: Consort writes text and has no embeddings; use the package sentence-transformers, or a server of embedding "
    "models such as Text Embeddings Inference."
)


class TextModel(ABC):
    """A model that continues texts and conversations.

    All methods raise ConsortError: InvalidRequestError with the field's name for what can't be answered as it is.
    """

    @abstractmethod
    def close(self) -> None:
        """End what the model holds; so does the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams = DEFAULTS, *, model: str | None = None
    ) -> list[Answer]:
        """Continue texts, all at the same time; return an answer for each, in their order.

        prompts: one prompt or several, as texts or token ids.
        model: an adapter's name, for instance; None: the model itself.
        """
        documents = self._answer("/v1/completions", completion_bodies(prompts, params, model))
        return [Answer.read(document) for document in documents]

    def chat(
        self,
        messages: Messages,
        params: SamplingParams = DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a conversation.

        messages: such as [{"role": "user", "content": "Hello!"}].
        tools: functions that the model may call, as OpenAI's API has them.
        model: an adapter's name, for instance; None: the model itself.
        options: further fields of /v1/chat/completions, such as `tool_choice` or `chat_template_kwargs`.
        """
        return self.chat_all([messages], params, tools=tools, model=model, **options)[0]

    def chat_all(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams = DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Answer conversations, all at the same time; arguments as in `chat`."""
        bodies = [chat_body(messages, params, tools, model, options) for messages in conversations]
        return [Answer.read(document) for document in self._answer("/v1/chat/completions", bodies)]

    def stream(self, prompt: Prompt, params: SamplingParams = DEFAULTS, *, model: str | None = None) -> Iterator[Piece]:
        """Continue a text; yield pieces as they come. Closing the iterator ends the request."""
        return self._pieces("/v1/completions", completion_body(prompt, params, model))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams = DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        **options: Any,
    ) -> Iterator[Piece]:
        """Answer a conversation; yield pieces as they come. Arguments as in `chat`."""
        return self._pieces("/v1/chat/completions", chat_body(messages, params, tools, model, options))

    def embed(self, *inputs: object, **options: object) -> NoReturn:
        """Raise InvalidRequestError, which says what embeds texts."""
        raise InvalidRequestError(NO_EMBEDDINGS, field="embed")

    def _pieces(self, route: Route, body: Body) -> Iterator[Piece]:
        return (Piece.read(document) for document in self._stream(route, body) if document["choices"])

    @abstractmethod
    def _answer(self, route: Route, bodies: Sequence[Body]) -> Sequence[Mapping[str, Any]]:
        """Return the documents that answer the bodies, which name a model only if it is not the usual one."""

    @abstractmethod
    def _stream(self, route: Route, body: Body) -> Iterator[Mapping[str, Any]]:
        """Yield the chunks of an answer."""


def completion_bodies(prompts: Prompt | Sequence[Prompt], params: SamplingParams, model: str | None) -> list[Body]:
    """Return a body for each prompt, of which there may be one alone."""
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    several: Sequence[Any] = [prompts] if is_single else prompts
    return [completion_body(prompt, params, model) for prompt in several]


def completion_body(prompt: Prompt, params: SamplingParams, model: str | None) -> Body:
    """Return the body that has a text continued."""
    named = {} if model is None else {"model": model}
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **params.body(), **named}


def chat_body(
    messages: Messages,
    params: SamplingParams,
    tools: Sequence[Mapping[str, Any]],
    model: str | None,
    options: Mapping[str, Any],
) -> Body:
    """Return the body that has a conversation answered."""
    body = params.body()
    if params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs}
    if tools:
        body["tools"] = list(tools)
    if model is not None:
        body["model"] = model
    return {"messages": list(messages), **body, **options}
