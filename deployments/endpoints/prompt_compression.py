"""Compresses the prompts of requests: finds what of them may be shortened, and what must stay. Samples nothing.

System and tool messages stay, and so does the question that the last user message ends with.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from actors.coordinator.request import Delta, Endpoint, Request
from decoding.errors import InvalidRequestError, UnavailableError
from decoding.sampling.params import SamplingParams
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.endpoints.compressor import LOOK_AHEAD, ChunkCompression, Compression, CompressionOptions, Compressor
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.selection import Stretch, last_paragraph, stretches
from deployments.fields.conversation import Message, TextPart
from deployments.fields.prompts import CompressedPrompt, CompressRequest, PromptCompression

AnswerAll = Callable[[Sequence[Request]], Awaitable[list[list[Delta]]]]  # runs requests; returns all their deltas
_Result = TypeVar("_Result")


class InThread(Protocol):
    """Works in a thread."""

    async def __call__(self, work: Callable[[], _Result]) -> _Result: ...


@dataclass(slots=True)
class _Text:
    """A text of a prompt, in stretches."""

    stretches: list[Stretch]

    @property
    def free(self) -> list[str]:
        return [stretch.text for stretch in self.stretches if not stretch.protected]

    def shortened(self, texts: Sequence[str]) -> str:
        """Return the text with others in place of those that may be shortened."""
        others = iter(texts)
        return "".join(stretch.text if stretch.protected else next(others) for stretch in self.stretches)


async def compress_body(
    body: CompletionRequest | ChatRequest, endpoint: ServedEndpoint, answer: AnswerAll, in_thread: InThread
) -> None:
    """Replace the body's prompts by compressed ones, and note how long they were.

    Raises:
        InvalidRequestError: the endpoint has no compressor, or the prompt can't be compressed as wanted.
    """
    options = body.prompt_compression
    assert options is not None
    if options.method == "attention":
        await _choose_chunks(body, options, endpoint, answer, in_thread)
        return
    match body:
        case ChatRequest():
            before = [message.text for message in body.messages]
            body.messages = await _compress_messages(body.messages, options, endpoint, answer, in_thread)
            after = [message.text for message in body.messages]
        case CompletionRequest():
            before = _texts_of(body)
            after = [
                await _compress_text(text, _question_of(text, options), options, endpoint, answer, in_thread)
                for text in before
            ]
            body.prompt = [text or " " for text in after]

    def count() -> int:
        removed = _count(endpoint, before) - _count(endpoint, after)
        return sum(map(len, endpoint.prompts(body))) + removed

    body.original_tokens = await in_thread(count)


async def compress_alone(
    body: CompressRequest, endpoint: ServedEndpoint, answer: AnswerAll, in_thread: InThread
) -> CompressedPrompt:
    """Answer /compress; raises InvalidRequestError as `compress_body` does."""
    turns: list[dict[str, Any]] | None = None
    prompt: str | None = None
    if body.messages is not None:
        messages = await _compress_messages(body.messages, body, endpoint, answer, in_thread)
        before, after = [[message.text for message in given] for given in (body.messages, messages)]
        turns = [message.turn for message in messages]
    else:
        text = body.prompt or ""
        prompt = await _compress_text(text, body.question or "", body, endpoint, answer, in_thread)
        before, after = [text], [prompt]
    lengths = await in_thread(lambda: (_count(endpoint, before), _count(endpoint, after)))
    ratio = round(lengths[1] / lengths[0], 4) if lengths[0] else 1.0
    return CompressedPrompt(
        prompt=prompt, messages=turns, original_tokens=lengths[0], compressed_tokens=lengths[1], ratio=ratio
    )


def _compressor_requests(endpoint: ServedEndpoint, texts: Sequence[Sequence[int]], **params: Any) -> list[Request]:
    """Return requests to the endpoint's compressor. params: of their answers."""
    model = _compressor(endpoint).model
    compressor = Endpoint(f"{endpoint.name}/compressor", model, None, 0, endpoint.endpoint.decode)
    greedy = SamplingParams(temperature=0, **params)
    return [Request(compressor, text, greedy, speculate=False, may_cache=False) for text in texts]


def _compressor(endpoint: ServedEndpoint) -> Compressor:
    if endpoint.compressor is None:
        drafter = endpoint.config.drafter
        hint = f", for example to its drafter {drafter!r}" if drafter else " to a small model"
        reason = f"the endpoint {endpoint.name!r} has no compressor; set endpoints.{endpoint.name}.compressor{hint}"
        raise InvalidRequestError(f"prompt_compression: {reason}.", field="prompt_compression")
    return endpoint.compressor


def _texts_of(body: CompletionRequest) -> list[str]:
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if len(texts) < len(body.prompt):
        raise InvalidRequestError("prompt_compression: needs a prompt of text, not of token ids.", field="prompt")
    return texts


def _question_of(text: str, options: PromptCompression) -> str:
    """Return the question in a prompt: its last paragraph, unless it is the only one."""
    if options.question is not None:
        return options.question
    paragraph = last_paragraph(text)
    return "" if paragraph == text.strip() else paragraph


async def _choose_chunks(
    body: CompletionRequest | ChatRequest,
    options: PromptCompression,
    endpoint: ServedEndpoint,
    answer: AnswerAll,
    in_thread: InThread,
) -> None:
    """Shorten the body's prompts to chunks that keep their positions."""
    _check_attention(body, endpoint)
    compressions = await in_thread(partial(_begin_chunks, body, options, endpoint))
    passes = [tokens for compression in compressions for tokens in compression.passes]
    wanted = {"max_tokens": LOOK_AHEAD, "min_tokens": LOOK_AHEAD, "prompt_attention": True}
    requests = _compressor_requests(endpoint, passes, **wanted)
    if requests:
        await answer(requests)
    attention = map(_attention, requests)

    def finish() -> None:
        body.shortened = [
            compression.result([next(attention) for _ in compression.passes]) for compression in compressions
        ]
        body.original_tokens = sum(len(compression.tokens) for compression in compressions)

    await in_thread(finish)


def _check_attention(body: CompletionRequest | ChatRequest, endpoint: ServedEndpoint) -> None:
    """Raise InvalidRequestError if the endpoint can't keep positions."""
    compressor = _compressor(endpoint)
    reason = ""
    if not compressor.has_target_tokens:
        reason = f"attention needs a compressor with the target's tokens, which {compressor.model!r} has not"
    elif endpoint.config.kind not in ("plain", "speculative"):
        reason = "attention works at endpoints with a single target"
    elif body.searches:
        reason = "attention and use_beam_search don't go together"
    if reason:
        field = "prompt_compression.method"
        raise InvalidRequestError(f"{field}: {reason}; use sentence or perplexity.", field=field)


def _begin_chunks(
    body: CompletionRequest | ChatRequest, options: PromptCompression, endpoint: ServedEndpoint
) -> list[ChunkCompression]:
    compressor, code = _compressor(endpoint), bool(options.compress_code)
    match body:
        case ChatRequest():
            parts = [_chat_parts(endpoint.chat_text(body), body.messages, options)]
        case CompletionRequest():
            parts = [stretches(text, _question_of(text, options), code=code) for text in _texts_of(body)]
    wanted = _options(options, "", options.target_tokens)
    return [
        ChunkCompression(tokens, part, wanted, compressor.tokenizer, compressor.context_length - 1)
        for tokens, part in zip(endpoint.prompts(body), parts, strict=True)
    ]


def _chat_parts(text: str, messages: Sequence[Message], options: PromptCompression) -> list[Stretch]:
    """Return what of a chat's prompt may be shortened. What the template changed stays."""
    asking, kept = _asking(messages, options)
    parts: list[Stretch] = []
    end = 0
    for index, message in enumerate(messages):
        question = kept if index == asking else None
        code = bool(options.compress_code)
        free = _may_shorten(message)
        for stretch in stretches(message.text, question, code=code) if free else [Stretch(message.text, True)]:
            shown = stretch.text.strip()
            start = text.find(shown, end)
            if shown and start >= 0:
                parts += [Stretch(text[end:start], True), Stretch(shown, stretch.protected)]
                end = start + len(shown)
    return [*parts, Stretch(text[end:], True)]


async def _compress_text(
    text: str,
    question: str,
    options: PromptCompression,
    endpoint: ServedEndpoint,
    answer: AnswerAll,
    in_thread: InThread,
) -> str:
    parts = _Text(stretches(text, question, code=bool(options.compress_code)))
    (shortened,) = await _shorten([parts], question, 0, options, endpoint, answer, in_thread)
    return shortened


async def _compress_messages(
    messages: Sequence[Message],
    options: PromptCompression,
    endpoint: ServedEndpoint,
    answer: AnswerAll,
    in_thread: InThread,
) -> list[Message]:
    asking, kept = _asking(messages, options)
    question = kept if options.question is None else options.question
    free = [index for index, message in enumerate(messages) if _may_shorten(message)]
    code = bool(options.compress_code)
    texts = [_Text(stretches(messages[i].text, kept if i == asking else None, code=code)) for i in free]
    others = "".join(message.text for index, message in enumerate(messages) if index not in free)
    protected = _compressor(endpoint).count(others)
    shortened = await _shorten(texts, question, protected, options, endpoint, answer, in_thread)
    result = list(messages)
    for index, text in zip(free, shortened, strict=True):
        result[index] = messages[index].model_copy(update={"content": [TextPart(type="text", text=text)]})
    return result


def _asking(messages: Sequence[Message], options: PromptCompression) -> tuple[int, str]:
    """Return the index of the last user message, −1 if there is none, and the question that stays in it."""
    asking = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    asked = messages[asking].text if asking >= 0 else ""
    question = options.question
    return asking, question if question and question in asked else last_paragraph(asked)


def _may_shorten(message: Message) -> bool:
    return message.role in ("user", "assistant") and bool(message.content) and not message.tool_calls


async def _shorten(
    texts: Sequence[_Text],
    question: str,
    protected: int,
    options: PromptCompression,
    endpoint: ServedEndpoint,
    answer: AnswerAll,
    in_thread: InThread,
) -> list[str]:
    """Return the texts with what may be shortened shortened. protected: tokens of other texts, which stay."""
    begin = partial(_begin, texts, question, protected, options, _compressor(endpoint))
    compression = await in_thread(begin)
    requests = _compressor_requests(endpoint, compression.passes, max_tokens=1, prompt_logprobs=0)
    answers = await answer(requests) if requests else []
    logprobs = [[token.logprob for delta in deltas for token in delta.prompt_logprobs or ()] for deltas in answers]
    shortened = iter(await in_thread(partial(compression.result, logprobs)))
    return [text.shortened([next(shortened) for _ in text.free]) for text in texts]


def _begin(
    texts: Sequence[_Text], question: str, protected: int, options: PromptCompression, compressor: Compressor
) -> Compression:
    budget = options.target_tokens
    if budget is not None:
        kept = [stretch.text for text in texts for stretch in text.stretches if stretch.protected]
        protected += compressor.count("".join(kept))
        if budget <= protected:
            reason = f"should be above {protected}, the tokens that may not be shortened, not {budget}"
            raise InvalidRequestError(f"target_tokens: {reason}.", field="prompt_compression.target_tokens")
        budget -= protected
    return compressor.begin(
        [free for text in texts for free in text.free],
        _options(options, question, budget),
    )


def _options(options: PromptCompression, question: str, budget: int | None) -> CompressionOptions:
    return CompressionOptions(
        method=options.method,
        rate=options.rate,
        budget=budget,
        question=question,
        keep_last=options.keep_last or 0,
        force_tokens=frozenset(options.force_tokens or ()),
    )


def _count(endpoint: ServedEndpoint, texts: Sequence[str]) -> int:
    tokenizer = endpoint.encoder.tokenizer
    return sum(len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) for text in texts if text)


def _attention(request: Request) -> Sequence[float]:
    """Return the attention of the request's answer to each token of the prompt."""
    if not request.prompt_attention:
        raise UnavailableError("the compressor has not said what it attended to; ask again")
    return request.prompt_attention
