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

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams = _DEFAULTS) -> list[Answer]:
        """Continue texts, all at the same time; return an answer for each, in their order.

        prompts: one prompt or several, as texts or token ids.
        """
        bodies = [{"prompt": _as_prompt(prompt), **params.body()} for prompt in _prompts(prompts)]
        return [Answer.read(document) for document in self._answer("/v1/completions", bodies)]

    def chat(
        self,
        messages: Messages,
        params: SamplingParams = _DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Answer:
        """Answer a conversation.

        Args:
            messages: such as [{"role": "user", "content": "Hello!"}].
            tools: functions that the model may call, as OpenAI's API has them.
            options: further fields of /v1/chat/completions, such as `tool_choice` or `chat_template_kwargs`.
        """
        return self.chat_all([messages], params, tools=tools, **options)[0]

    def chat_all(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams = _DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> list[Answer]:
        """Answer conversations, all at the same time; arguments as in `chat`."""
        bodies = [_chat_body(messages, params, tools, options) for messages in conversations]
        return [Answer.read(document) for document in self._answer("/v1/chat/completions", bodies)]

    def stream(self, prompt: Prompt, params: SamplingParams = _DEFAULTS) -> Iterator[Piece]:
        """Continue a text; yield pieces as they come. Closing the iterator ends the request."""
        return self._pieces("/v1/completions", {"prompt": _as_prompt(prompt), **params.body()})

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams = _DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Iterator[Piece]:
        """Answer a conversation; yield pieces as they come. Arguments as in `chat`."""
        return self._pieces("/v1/chat/completions", _chat_body(messages, params, tools, options))

    def _pieces(self, route: Route, body: Body) -> Iterator[Piece]:
        return (Piece.read(document) for document in self._stream(route, body) if document["choices"])

    @abstractmethod
    def _answer(self, route: Route, bodies: Sequence[Body]) -> Sequence[Mapping[str, Any]]:
        """Return the documents that answer the bodies. Bodies name no model."""

    @abstractmethod
    def _stream(self, route: Route, body: Body) -> Iterator[Mapping[str, Any]]:
        """Yield the chunks of an answer."""


def _chat_body(
    messages: Messages, params: SamplingParams, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Body:
    body = params.body()
    if params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs}
    if tools:
        body["tools"] = list(tools)
    return {"messages": list(messages), **body, **options}


def _prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """Return one prompt or several as a list."""
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_single else prompts


def _as_prompt(prompt: Prompt) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)
