"""A model in this process, for event loops."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NoReturn, Self

from consort.llm import LocalModel
from consort.text_model import (
    DEFAULTS,
    NO_EMBEDDINGS,
    Answer,
    Body,
    Messages,
    Piece,
    Prompt,
    Route,
    SamplingParams,
    chat_body,
    completion_bodies,
    completion_body,
)
from decoding.errors import InvalidRequestError


class AsyncLLM(LocalModel):
    """`LLM` for asyncio: awaited methods with the same arguments, any number at a time, all in one batch.

    >>> async with AsyncLLM("Qwen/Qwen3-8B", drafter="Qwen/Qwen3-0.6B") as llm:
    ...     async for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=64, seed=1)):
    ...         print(piece.text, end="")

    Loading takes seconds and blocks: do it before the event loop starts, or by `asyncio.to_thread`. Requests end when
    their task is cancelled, and when their iterator is closed. All methods raise ConsortError as `LLM`'s do.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams = DEFAULTS, *, model: str | None = None
    ) -> list[Answer]:
        """Continue texts; return an answer for each, in their order. Arguments as in `LLM.generate`."""
        return await self._answers("/v1/completions", completion_bodies(prompts, params, model))

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams = DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a conversation; arguments as in `LLM.chat`."""
        (answer,) = await self.chat_all([messages], params, tools=tools, model=model, **options)
        return answer

    async def chat_all(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams = DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Answer conversations, all at the same time; arguments as in `LLM.chat`."""
        bodies = [chat_body(messages, params, tools, model, options) for messages in conversations]
        return await self._answers("/v1/chat/completions", bodies)

    def stream(
        self, prompt: Prompt, params: SamplingParams = DEFAULTS, *, model: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Continue a text; yield pieces as they come, with `n` those of several answers."""
        return self._pieces("/v1/completions", completion_body(prompt, params, model))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams = DEFAULTS,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[Piece, None]:
        """Answer a conversation; yield pieces as they come. Arguments as in `LLM.chat`."""
        return self._pieces("/v1/chat/completions", chat_body(messages, params, tools, model, options))

    def embed(self, *inputs: object, **options: object) -> NoReturn:
        """Raise InvalidRequestError, which says what embeds texts."""
        raise InvalidRequestError(NO_EMBEDDINGS, field="embed")

    async def _answers(self, route: Route, bodies: Sequence[Body]) -> list[Answer]:
        return [Answer.read(document) for document in await self._endpoint.answer_async(route, bodies)]

    async def _pieces(self, route: Route, body: Body) -> AsyncGenerator[Piece, None]:
        async with aclosing(self._endpoint.stream_async(route, body)) as documents:
            async for document in documents:
                if document["choices"]:
                    yield Piece.read(document)
