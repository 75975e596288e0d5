"""Answers with choices, whole or in chunks: what completions and chat share."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, SkipValidation

from actors.coordinator.request import Delta, Request, Statistics
from decoding.sampling.stopping import FinishReason
from deployments.apis.decoder import TokenDecoder
from deployments.apis.ensemble_details import EnsembleDetail, EnsembleTally, ProgressDetail, describe_progress
from deployments.apis.errors import error_event, sse
from deployments.apis.parts import Choice, EchoedPrompt, Part
from deployments.apis.token_details import (
    ChatLogprobs,
    CompletionLogprobs,
    Json,
    PromptLogprobs,
    TokenDetail,
    prompt_logprobs,
    token_details,
)
from deployments.apis.writer import AnswerIdentity, Writer
from deployments.fields.generation import GenerationRequest
from deployments.strategies.panel import Outcome, Progress

ChatFinishReason = FinishReason | Literal["tool_calls"]


class PromptTokensDetails(BaseModel):
    """What the prompts' tokens are made of."""

    cached_tokens: int  # not computed, because a cache had them


class CompletionTokensDetails(BaseModel):
    """What the answers' tokens are made of."""

    reasoning_tokens: int  # up to the end of what the model wrote before its content
    accepted_prediction_tokens: int  # of the prediction, which are in the answer
    rejected_prediction_tokens: int  # the others


class CompressionUsage(BaseModel):
    """What compression did to the prompts."""

    original_tokens: int
    compressed_tokens: int
    ratio: float  # compressed_tokens / original_tokens


class Usage(BaseModel):
    """Token counts. A prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    prompt_compression: CompressionUsage | None = None  # not sent without compression


class ProposerCounts(BaseModel):
    """One proposer's share of the draft tokens. A token that several offer counts for the first."""

    drafted: int
    accepted: int


class Speculation(BaseModel):
    """Statistics of speculation, summed over the answers."""

    steps: int  # target steps
    drafted: int
    accepted: int
    acceptance_rate: float  # accepted / drafted
    acceptance_length: float  # tokens per target step
    hit_rate: float  # share of rejections after which an alternative draft was ready
    proposers: dict[str, ProposerCounts]  # by the name of who drafted them


def speculation_of(total: Statistics) -> Speculation:
    """Build `speculation` from the summed statistics."""
    return Speculation(
        steps=total.steps,
        drafted=total.drafted,
        accepted=total.accepted,
        acceptance_rate=round(total.acceptance_rate, 4),
        acceptance_length=round(total.acceptance_length, 4),
        hit_rate=round(total.hit_rate, 4),
        proposers={
            name: ProposerCounts(drafted=count, accepted=total.accepted_by.get(name, 0))
            for name, count in total.drafted_by.items()
        },
    )


class AnyChoice(BaseModel):
    """Fields that all choices share. Unset fields are not sent."""

    index: int
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    score: float | None = None  # of a beam search
    token_details: SkipValidation[list[TokenDetail] | None] = None
    ensemble: EnsembleDetail | None = None


class CompletionChoice(AnyChoice):
    """A text or its next piece."""

    text: str
    logprobs: SkipValidation[CompletionLogprobs | None]
    prompt_logprobs: SkipValidation[PromptLogprobs | None] = None


class FunctionCall(BaseModel):
    """A function that the model calls."""

    name: str
    arguments: str  # JSON


class ToolCall(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionPiece(BaseModel):
    """A function's name, or the next piece of its arguments."""

    name: str | None = None
    arguments: str


class ToolCallPiece(BaseModel):
    """Next piece of a tool call. Only the first names the function. Unset fields are not sent."""

    index: int  # among the choice's calls
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class ChatMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatPiece(BaseModel):
    """Next piece of the assistant's turn. Only the first names the role."""

    role: Literal["assistant"] | None = None
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPiece] | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning_content or self.tool_calls)


class ChatChoice(AnyChoice):
    """A choice of a whole answer."""

    message: ChatMessage
    logprobs: SkipValidation[ChatLogprobs | None]


class ChatChunkChoice(AnyChoice):
    """A choice of a chunk."""

    delta: ChatPiece
    logprobs: SkipValidation[ChatLogprobs | None]


AnswerChoice = CompletionChoice | ChatChoice | ChatChunkChoice


class Answer(BaseModel):
    """Body of an answer or of one of its chunks. Unset fields are not sent."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str | None = None  # version of the weights, if they can be replaced
    choices: Sequence[AnswerChoice]
    prompt_logprobs: SkipValidation[PromptLogprobs | None] = None  # of a chat
    usage: Usage | None = None
    speculation: Speculation | None = None
    seed: int | None = None
    compressed_prompt: str | list[str] | list[dict[str, Any]] | None = None
    progress: ProgressDetail | None = None  # in streams of strategies, before an answer

    def document(self) -> dict[str, Any]:
        """Set fields, for msgspec; the fields about tokens are encoded already."""
        return self.model_dump(exclude_unset=True, warnings=False)

    def json_text(self) -> str:
        return msgspec.json.encode(self.document()).decode()


class AnswerWriter(Writer):
    """Writes the deltas of one HTTP request, which may have several prompts and several choices for each."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(
        self, body: GenerationRequest, requests: Sequence[Request], decoder: TokenDecoder, *, identity: AnswerIdentity
    ) -> None:
        """requests: the choices of the first prompt, then those of the next, and so on."""
        self._body, self._decoder, self._seed = body, decoder, identity.seed
        self._id = self.id_prefix + identity.answer_id
        self._created = identity.created
        self._versions: set[str] = set()  # of the weights that wrote the choices
        self._ensembles = EnsembleTally(requests, wanted=body.return_members is not False)
        self._by_token = body.logprob_count is not None or bool(body.return_token_details)
        prompts = [request.prompt for request in requests[:: body.choices]]
        self._prompt_tokens = sum(map(len, prompts))
        self._prompt_logprobs_by_index: dict[int, Json] = {}
        echoes = [self._echoed_prompt(index, prompt) for index, prompt in enumerate(prompts)]
        self._choices = [
            Choice(
                request,
                decoder,
                by_token=self._by_token,
                echo=echoes[index // body.choices],
                prompt_only=body.prompt_only,
            )
            for index, request in enumerate(requests)
        ]

    def begin(self) -> str:
        return ""

    def add(self, index: int, delta: Delta) -> str:
        """Add a delta; return its chunks, if it has anything to show. The last chunk has the statistics."""
        self._versions |= set() if delta.weights is None else {delta.weights}
        part, first = self._choices[index].add(delta)
        self._ensembles.add(index, delta)
        pieces = self._read(index, part)
        # A chat holds back some text, such as the marks around a call.
        has_text = any(piece.has_text for piece in pieces) if pieces else bool(part.text)
        if not self._body.stream or not (has_text or part.finish or first or (self._by_token and part.tokens)):
            return ""
        chunks = [self._chunk([choice]) for choice in self._chunk_choices(index, part, pieces, first=first)]
        self._add_prompt_logprobs(chunks[-1], index, part)
        if all(choice.finish for choice in self._choices):
            chunks[-1].speculation, chunks[-1].seed = speculation_of(self._total()), self._seed
        return "".join(sse(chunk.json_text()) for chunk in chunks)

    def add_progress(self, index: int, event: Progress | Outcome) -> str:
        """Return a chunk with progress and empty text, which clients that don't know `progress` ignore."""
        if isinstance(event, Outcome):
            self._ensembles.conclude(index, event)
            return ""
        if not self._body.stream:
            return ""
        part = Part()
        chunk = self._chunk(self._chunk_choices(index, part, self._read(index, part), first=False))
        chunk.progress = describe_progress(event)
        return sse(chunk.json_text())

    def end(self) -> str:
        chunk = ""
        if self._body.include_usage:
            last = self._chunk([])
            self._conclude(last)
            chunk = sse(last.json_text())
        return chunk + sse("[DONE]")

    def fail(self, error: Exception) -> str:
        return error_event(error, "openai")

    def whole(self) -> dict[str, Any]:
        returned = self._returned()
        parts = [self._choices[index].whole() for index in returned]
        choices = [self._choice(index, part) for index, part in zip(returned, parts, strict=True)]
        for rank, choice in enumerate(choices):
            choice.index = rank
        answer = self._answer(self.object, choices)
        self._add_prompt_logprobs(answer, returned[0], parts[0])
        self._conclude(answer)
        return answer.document()

    @abstractmethod
    def _choice(self, index: int, part: Part) -> AnswerChoice:
        """Build a choice of a whole answer. index: of its request; with best_of the choice gets another."""

    def _read(self, index: int, part: Part) -> list[ChatPiece]:
        """Return the pieces of a chat's turn that the part adds."""
        return []

    def _chunk_choices(
        self, index: int, part: Part, deltas: Sequence[ChatPiece], *, first: bool
    ) -> Sequence[AnswerChoice]:
        """Build one choice for each chunk, one or more. deltas: a chat's. first: no chunk of this index came before."""
        return [self._choice(index, part)]

    def _echoed_prompt(self, prompt_index: int, prompt: Sequence[int]) -> EchoedPrompt | None:
        """Prompt that begins each answer; None: no echo."""
        return None

    def _add_prompt_logprobs(self, answer: Answer, index: int, part: Part) -> None:
        """Add the prompt's log-probabilities if they belong to the answer and not to its choices."""

    def _returned(self) -> Sequence[int]:
        """Indices of the `n` best choices of every prompt, or of all in their order if there are only `n`."""
        made, wanted = self._body.choices, self._body.n or 1
        every = range(len(self._choices))
        if made == wanted:
            return every
        groups = [every[start : start + made] for start in every[::made]]
        means = [choice.mean_logprob for choice in self._choices]
        return [index for group in groups for index in sorted(group, key=means.__getitem__, reverse=True)[:wanted]]

    def _answer(self, kind: str, choices: Sequence[AnswerChoice]) -> Answer:
        answer = Answer(id=self._id, object=kind, created=self._created, model=self._body.model, choices=choices)
        if self._versions:
            answer.system_fingerprint = "+".join(sorted(self._versions))
        return answer

    def _chunk(self, choices: Sequence[AnswerChoice]) -> Answer:
        """Build a chunk. Where usage is asked for, all but the last have it as null, as OpenAI's have."""
        chunk = self._answer(self.chunk_object, choices)
        if self._body.include_usage:
            chunk.usage = None
        return chunk

    def _common(self, index: int, part: Part) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": index, "finish_reason": part.finish}
        if part.finish is not None:
            fields["stop_reason"] = part.stop_reason
            ensemble = self._ensembles.detail(index)
            if ensemble is not None:
                fields["ensemble"] = ensemble
        if part.score is not None:
            fields["score"] = part.score
        if self._body.return_token_details:
            fields["token_details"] = token_details(part)
        return fields

    def _prompt_logprobs(self, index: int, part: Part) -> Json:
        """Log-probabilities of the prompt if requested and known. All choices of a prompt share them."""
        count, prompt = self._body.prompt_logprobs, index // self._body.choices
        if count is None or part.prompt_logprobs is None:
            return None
        if prompt not in self._prompt_logprobs_by_index:
            self._prompt_logprobs_by_index[prompt] = prompt_logprobs(part.prompt_logprobs, count, self._decoder)
        return self._prompt_logprobs_by_index[prompt]

    def _conclude(self, answer: Answer) -> None:
        """Add what is known at the end."""
        answer.usage, answer.speculation, answer.seed = self._usage(), speculation_of(self._total()), self._seed
        if self._body.compressed_prompt is not None:
            answer.compressed_prompt = self._body.compressed_prompt

    def _usage(self) -> Usage:
        committed, count = self._total().committed, self._body.choices
        groups = [self._choices[start : start + count] for start in range(0, len(self._choices), count)]
        cached = sum(min(choice.statistics.cached for choice in group) for group in groups)
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=committed,
            total_tokens=self._prompt_tokens + committed,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=self._completion_tokens_details(),
        )
        if self._body.compressed is not None:
            original = self._body.compressed.original_tokens
            ratio = round(self._prompt_tokens / original, 4)
            usage.prompt_compression = CompressionUsage(
                original_tokens=original, compressed_tokens=self._prompt_tokens, ratio=ratio
            )
        return usage

    def _completion_tokens_details(self) -> CompletionTokensDetails:
        return CompletionTokensDetails(reasoning_tokens=0, accepted_prediction_tokens=0, rejected_prediction_tokens=0)

    def _total(self) -> Statistics:
        return sum((choice.statistics for choice in self._choices), Statistics())
