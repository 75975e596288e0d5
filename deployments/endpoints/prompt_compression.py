"""Compresses the prompts of requests: finds what of them may be shortened, and what must stay.

System and tool messages stay, and so does the question that the last user message ends with.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from actors.coordinator.request import Delta, Endpoint, Request
from decoding.errors import InvalidRequestError, UnavailableError
from decoding.sampling.params import SamplingParams
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.endpoints.compressor import LOOK_AHEAD, ChunkCompression, Compression, CompressionOptions, Compressor
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.selection import Stretch, last_paragraph, stretches
from deployments.fields.conversation import Message, TextPart
from deployments.fields.prompts import Compressed, CompressedPrompt, CompressRequest, PromptCompression

AnswerAll = Callable[[Sequence[Request]], Awaitable[list[list[Delta]]]]  # runs requests; returns all their deltas
_Result = TypeVar("_Result")


class InThread(Protocol):
    """Works in a thread."""

    async def __call__(self, work: Callable[[], _Result]) -> _Result: ...


class PromptShortener:
    """Shortens the prompts of one request.

    All methods raise InvalidRequestError if the endpoint has no compressor or can't compress the prompt as wanted.
    """

    def __init__(
        self, options: PromptCompression, endpoint: ServedEndpoint, answer: AnswerAll, in_thread: InThread
    ) -> None:
        self._options, self._endpoint, self._answer, self._in_thread = options, endpoint, answer, in_thread

    async def shorten_body(self, body: CompletionRequest | ChatRequest) -> None:
        """Replace the body's prompts by compressed ones, and note how long they were."""
        if self._options.method == "attention":
            await self._choose_chunks(body)
            return
        match body:
            case ChatRequest():
                before = [message.text for message in body.messages]
                body.messages = await self._shorten_messages(body.messages)
                after = [message.text for message in body.messages]
            case CompletionRequest():
                before = _texts_of(body)
                after = [await self._shorten_text(text, self._question_of(text)) for text in before]
                body.prompt = [text or " " for text in after]

        tokenizer = self._endpoint.encoder.tokenizer

        def count() -> int:
            removed = _count(tokenizer, before) - _count(tokenizer, after)
            return sum(map(len, self._endpoint.prompts(body))) + removed

        body.compressed = Compressed(await self._in_thread(count))

    async def compress(self, body: CompressRequest) -> CompressedPrompt:
        """Answer /compress."""
        turns: list[dict[str, Any]] | None = None
        prompt: str | None = None
        if body.messages is not None:
            messages = await self._shorten_messages(body.messages)
            before, after = [[message.text for message in given] for given in (body.messages, messages)]
            turns = [message.turn for message in messages]
        else:
            text = body.prompt or ""
            prompt = await self._shorten_text(text, body.question or "")
            before, after = [text], [prompt]
        tokenizer = self._endpoint.encoder.tokenizer
        original, compressed = await self._in_thread(lambda: (_count(tokenizer, before), _count(tokenizer, after)))
        ratio = round(compressed / original, 4) if original else 1.0
        return CompressedPrompt(
            prompt=prompt, messages=turns, original_tokens=original, compressed_tokens=compressed, ratio=ratio
        )

    @property
    def _compressor(self) -> Compressor:
        endpoint = self._endpoint
        if endpoint.compressor is None:
            drafter = endpoint.config.drafter
            hint = f", for example to its drafter {drafter!r}" if drafter else " to a small model"
            reason = f"the endpoint {endpoint.name!r} has no compressor; set endpoints.{endpoint.name}.compressor{hint}"
            raise InvalidRequestError(f"prompt_compression: {reason}.", field="prompt_compression")
        return endpoint.compressor

    def _requests(self, texts: Sequence[Sequence[int]], **params: Any) -> list[Request]:
        """Return requests to let the compressor read the texts. params: of its answers."""
        served = self._endpoint
        compressor = Endpoint(f"{served.name}/compressor", self._compressor.model, None, 0, served.endpoint.decode)
        greedy = SamplingParams(temperature=0, **params)
        return [Request(compressor, text, greedy, speculate=False, may_cache=False) for text in texts]

    async def _choose_chunks(self, body: CompletionRequest | ChatRequest) -> None:
        """Shorten the body's prompts to chunks that keep their positions."""
        self._check_attention(body)
        compressions = await self._in_thread(partial(self._begin_chunks, body))
        passes = [tokens for compression in compressions for tokens in compression.passes]
        requests = self._requests(passes, max_tokens=LOOK_AHEAD, min_tokens=LOOK_AHEAD, prompt_attention=True)
        if requests:
            await self._answer(requests)
        attention = map(_attention, requests)

        def finish() -> None:
            prompts = [
                compression.result([next(attention) for _ in compression.passes]) for compression in compressions
            ]
            body.compressed = Compressed(sum(len(compression.tokens) for compression in compressions), prompts)

        await self._in_thread(finish)

    def _check_attention(self, body: CompletionRequest | ChatRequest) -> None:
        """Raise InvalidRequestError if the endpoint can't keep positions."""
        compressor, reason = self._compressor, ""
        if not compressor.has_target_tokens:
            reason = f"attention needs a compressor with the target's tokens, which {compressor.model!r} has not"
        elif self._endpoint.config.kind not in ("plain", "speculative"):
            reason = "attention works at endpoints with a single target"
        elif body.searches:
            reason = "attention and use_beam_search don't go together"
        if reason:
            field = "prompt_compression.method"
            raise InvalidRequestError(f"{field}: {reason}; use sentence or perplexity.", field=field)

    def _begin_chunks(self, body: CompletionRequest | ChatRequest) -> list[ChunkCompression]:
        compressor = self._compressor
        match body:
            case ChatRequest():
                parts = [self._chat_parts(self._endpoint.encoder.render(body.to_conversation()), body.messages)]
            case CompletionRequest():
                parts = [self._stretches(text, self._question_of(text)) for text in _texts_of(body)]
        wanted = self._compression_options("", self._options.target_tokens)
        return [
            ChunkCompression(tokens, part, wanted, compressor.tokenizer, compressor.window)
            for tokens, part in zip(self._endpoint.prompts(body), parts, strict=True)
        ]

    def _chat_parts(self, text: str, messages: Sequence[Message]) -> list[Stretch]:
        """Return what of a chat's prompt may be shortened. What the template changed stays."""
        asking, kept = self._asking(messages)
        parts: list[Stretch] = []
        end = 0
        for index, message in enumerate(messages):
            question = kept if index == asking else None
            free = _may_shorten(message)
            for stretch in self._stretches(message.text, question) if free else [Stretch(message.text, True)]:
                shown = stretch.text.strip()
                start = text.find(shown, end)
                if shown and start >= 0:
                    parts += [Stretch(text[end:start], True), Stretch(shown, stretch.protected)]
                    end = start + len(shown)
        return [*parts, Stretch(text[end:], True)]

    async def _shorten_text(self, text: str, question: str) -> str:
        (shortened,) = await self._shorten([self._stretches(text, question)], question, 0)
        return shortened

    async def _shorten_messages(self, messages: Sequence[Message]) -> list[Message]:
        asking, kept = self._asking(messages)
        question = kept if self._options.question is None else self._options.question
        free = [index for index, message in enumerate(messages) if _may_shorten(message)]
        texts = [self._stretches(messages[i].text, kept if i == asking else None) for i in free]
        others = "".join(message.text for index, message in enumerate(messages) if index not in free)
        shortened = await self._shorten(texts, question, _count(self._compressor.tokenizer, [others]))
        result = list(messages)
        for index, text in zip(free, shortened, strict=True):
            result[index] = messages[index].model_copy(update={"content": [TextPart(type="text", text=text)]})
        return result

    async def _shorten(self, texts: Sequence[Sequence[Stretch]], question: str, protected: int) -> list[str]:
        """Return the texts with what may be shortened shortened. protected: tokens of other texts, which stay."""
        compression = await self._in_thread(partial(self._begin, texts, question, protected))
        requests = self._requests(compression.passes, max_tokens=1, prompt_logprobs=0)
        answers = await self._answer(requests) if requests else []
        logprobs = [[token.logprob for delta in deltas for token in delta.prompt_logprobs or ()] for deltas in answers]
        shortened = iter(await self._in_thread(partial(compression.result, logprobs)))
        return ["".join(each.text if each.protected else next(shortened) for each in text) for text in texts]

    def _begin(self, texts: Sequence[Sequence[Stretch]], question: str, protected: int) -> Compression:
        budget = self._options.target_tokens
        if budget is not None:
            fixed = "".join(each.text for text in texts for each in text if each.protected)
            protected += _count(self._compressor.tokenizer, [fixed])
            if budget <= protected:
                reason = f"should be above {protected}, the tokens that may not be shortened, not {budget}"
                raise InvalidRequestError(f"target_tokens: {reason}.", field="prompt_compression.target_tokens")
            budget -= protected
        free = [each.text for text in texts for each in text if not each.protected]
        return self._compressor.begin(free, self._compression_options(question, budget))

    def _compression_options(self, question: str, budget: int | None) -> CompressionOptions:
        options = self._options
        return CompressionOptions(
            method=options.method,
            rate=options.rate,
            budget=budget,
            question=question,
            keep_last=options.keep_last or 0,
            force_tokens=frozenset(options.force_tokens or ()),
        )

    def _stretches(self, text: str, question: str | None) -> list[Stretch]:
        return stretches(text, question, code=bool(self._options.compress_code))

    def _question_of(self, text: str) -> str:
        """Return the question in a prompt: its last paragraph, unless it is the only one."""
        if self._options.question is not None:
            return self._options.question
        paragraph = last_paragraph(text)
        return "" if paragraph == text.strip() else paragraph

    def _asking(self, messages: Sequence[Message]) -> tuple[int, str]:
        """Return the index of the last user message, −1 if there is none, and the question that stays in it."""
        asking = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
        asked = messages[asking].text if asking >= 0 else ""
        question = self._options.question
        return asking, question if question and question in asked else last_paragraph(asked)


def _count(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> int:
    """Return how many tokens the texts have, one by one."""
    return sum(len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) for text in texts if text)


def _texts_of(body: CompletionRequest) -> list[str]:
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if len(texts) < len(body.prompt):
        raise InvalidRequestError("prompt_compression: needs a prompt of text, not of token ids.", field="prompt")
    return texts


def _may_shorten(message: Message) -> bool:
    return message.role in ("user", "assistant") and bool(message.content) and not message.tool_calls


def _attention(request: Request) -> Sequence[float]:
    if not request.prompt_attention:
        raise UnavailableError("the compressor has not said what it attended to; ask again")
    return request.prompt_attention
