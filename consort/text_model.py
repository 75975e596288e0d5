"""What `LLM` and `Client` share: requests as Python has them become bodies of the HTTP interface."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from consort.answers import Answer, Piece
from consort.params import SamplingParams

Prompt = str | Sequence[int]  # a text, or token ids
Messages = Sequence[Mapping[str, Any]]  # of a conversation, as OpenAI's API has them, oldest first
Body = dict[str, Any]
Route = Literal["/v1/completions", "/v1/chat/completions"]

_DEFAULTS = SamplingParams()


class TextModel(ABC):
    """A model that continues texts and conversations.

    All methods raise ConsortError: InvalidRequestError for what can't be answered as it is, with the field's name;
    UnavailableError and others for what failed.
    """

    @abstractmethod
    def close(self) -> None:
        """End what the model holds; so does the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams = _DEFAULTS, *, model: str | None = None
    ) -> list[Answer]:
        """Continue texts, all at the same time; return an answer for each, in their order.

        Args:
            prompts: one prompt or several, as texts or token ids.
            model: an adapter's name, for instance; None: the model itself.
        """
        bodies = [_completion_body(prompt, params, model) for prompt in _prompts(prompts)]
        return [Answer.read(document) for document in self._answer("/v1/completions", bodies)]

    def chat(
        self,
        messages: Messages,
        params: SamplingParams = _DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a conversation.

        Args:
            messages: such as [{"role": "user", "content": "Hello!"}].
            tools: functions that the model may call, as OpenAI's API has them.
            model: an adapter's name, for instance; None: the model itself.
            options: further fields of /v1/chat/completions, such as `tool_choice` or `chat_template_kwargs`.
        """
        return self.chat_all([messages], params, tools=tools, model=model, **options)[0]

    def chat_all(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams = _DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Answer conversations, all at the same time; arguments as in `chat`."""
        bodies = [_chat_body(messages, params, tools, model, options) for messages in conversations]
        return [Answer.read(document) for document in self._answer("/v1/chat/completions", bodies)]

    def stream(
        self, prompt: Prompt, params: SamplingParams = _DEFAULTS, *, model: str | None = None
    ) -> Iterator[Piece]:
        """Continue a text; yield pieces as they come. Closing the iterator ends the request."""
        return self._pieces("/v1/completions", _completion_body(prompt, params, model))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams = _DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        **options: Any,
    ) -> Iterator[Piece]:
        """Answer a conversation; yield pieces as they come. Arguments as in `chat`."""
        return self._pieces("/v1/chat/completions", _chat_body(messages, params, tools, model, options))

    def _pieces(self, route: Route, body: Body) -> Iterator[Piece]:
        return (Piece.read(document) for document in self._stream(route, body) if document["choices"])

    @abstractmethod
    def _answer(self, route: Route, bodies: Sequence[Body]) -> Sequence[Mapping[str, Any]]:
        """Return the documents that answer the bodies, which name a model only if it is not the usual one."""

    @abstractmethod
    def _stream(self, route: Route, body: Body) -> Iterator[Mapping[str, Any]]:
        """Yield the chunks of an answer."""


def _completion_body(prompt: Prompt, params: SamplingParams, model: str | None) -> Body:
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **params.body(), **_named(model)}


def _chat_body(
    messages: Messages,
    params: SamplingParams,
    tools: Sequence[Mapping[str, Any]],
    model: str | None,
    options: Mapping[str, Any],
) -> Body:
    body = params.body()
    if params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs}
    if tools:
        body["tools"] = list(tools)
    return {"messages": list(messages), **body, **_named(model), **options}


def _named(model: str | None) -> Body:
    return {} if model is None else {"model": model}


def _prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """Return one prompt or several as a list."""
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_single else prompts
