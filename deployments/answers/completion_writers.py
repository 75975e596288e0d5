"""Writes answers to completions and chat, whole or in chunks. Knows no HTTP."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from actors.coordinator.request import Delta, Request, Statistics
from deployments.answers.chat_turn import ChatTurn
from deployments.answers.echoed_prompt import EchoedPrompt
from deployments.answers.ensemble_details import describe_progress
from deployments.answers.ensemble_tally import EnsembleTally
from deployments.answers.events import event as sse
from deployments.answers.identity import AnswerIdentity
from deployments.answers.parsing.choice import make_parser
from deployments.answers.parts import Choice, Part, reasoning_tokens
from deployments.answers.schema import (
    Answer,
    AnswerChoice,
    ChatChoice,
    ChatChunkChoice,
    CompletionChoice,
    CompletionTokensDetails,
    CompressionUsage,
    PromptTokensDetails,
    Usage,
    speculation_of,
)
from deployments.answers.token_details import (
    Json,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    token_details,
)
from deployments.answers.writer import Writer
from deployments.requests.generation_request import GenerationRequest
from deployments.requests.schema import ChatRequest, CompletionRequest
from deployments.strategies.deliberation import Outcome, Progress
from deployments.tokenizers.token_decoder import TokenDecoder
from deployments.validation.errors import body_of


class AnswerWriter(Writer):
    """Writes the deltas of one HTTP request, which may have several prompts and several choices for each."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(
        self,
        body: GenerationRequest,
        requests: Sequence[Request],
        decoder: TokenDecoder,
        *,
        identity: AnswerIdentity,
    ) -> None:
        """requests: the choices of the first prompt, then those of the next, and so on."""
        self._body, self._decoder, self._seed = body, decoder, identity.seed
        self._id = self.id_prefix + identity.answer_id
        self._created = identity.created
        self._ensembles = EnsembleTally(requests, wanted=body.return_members is not False)
        self._prompt_tokens = sum(len(request.prompt) for request in requests[:: body.choices])
        self._prompt_logprobs_by_index: dict[int, Json] = {}
        echoes = [self._echoed_prompt(index, request.prompt) for index, request in enumerate(requests[:: body.choices])]
        self._choices = [self._begin(request, echoes[index // body.choices]) for index, request in enumerate(requests)]

    def begin(self) -> str:
        return ""

    def add(self, index: int, delta: Delta) -> str:
        """Add a delta; return its chunks, if it has anything to show. The last chunk has the statistics."""
        part, first = self._choices[index].add(delta)
        self._ensembles.add(index, delta)
        if not self._body.stream or not (part.text or part.finish or first or (self._by_token and part.tokens)):
            return ""
        choices = self._chunk_choices(index, part, first=first)
        chunks = [self._chunk([choice]) for choice in choices]
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
        chunk = self._chunk(self._chunk_choices(index, Part(), first=False))
        chunk.progress = describe_progress(event)
        return sse(chunk.json_text())

    def end(self) -> str:
        chunk = ""
        if self._body.include_usage:
            last = self._chunk([])
            last.usage, last.speculation, last.seed = self._usage(), speculation_of(self._total()), self._seed
            self._add_compressed_prompt(last)
            chunk = sse(last.json_text())
        return chunk + sse("[DONE]")

    def fail(self, error: Exception) -> str:
        return sse(body_of(error).model_dump_json(), name="error")

    def whole(self) -> dict[str, Any]:
        returned = self._returned()
        parts = [self._choices[index].whole() for index in returned]
        choices = [self._choice(index, part) for index, part in zip(returned, parts, strict=True)]
        for rank, choice in enumerate(choices):
            choice.index = rank
        answer = self._answer(self.object, choices)
        self._add_prompt_logprobs(answer, returned[0], parts[0])
        answer.usage, answer.speculation, answer.seed = self._usage(), speculation_of(self._total()), self._seed
        self._add_compressed_prompt(answer)
        return answer.document()

    @abstractmethod
    def _choice(self, index: int, part: Part) -> AnswerChoice:
        """Build a choice of a whole answer. index: of its request; with best_of the choice gets another."""

    @abstractmethod
    def _chunk_choices(self, index: int, part: Part, *, first: bool) -> Sequence[AnswerChoice]:
        """Build one choice for each chunk, one or more. first: no chunk of this index came before."""

    def _echoed_prompt(self, prompt_index: int, prompt: Sequence[int]) -> EchoedPrompt | None:
        """Prompt that begins each answer; None: no echo."""
        return None

    @abstractmethod
    def _add_prompt_logprobs(self, answer: Answer, index: int, part: Part) -> None:
        """Add the prompt's log-probabilities if they belong to the answer and not to its choices."""

    @property
    def _by_token(self) -> bool:
        return self._body.logprob_count is not None or bool(self._body.return_token_details)

    def _begin(self, request: Request, echo: EchoedPrompt | None) -> Choice:
        return Choice(
            request,
            self._decoder,
            by_token=self._by_token,
            echo=echo,
            prompt_only=self._body.prompt_only,
        )

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
        return Answer(id=self._id, object=kind, created=self._created, model=self._body.model, choices=choices)

    def _chunk(self, choices: Sequence[AnswerChoice]) -> Answer:
        """Build a chunk. Where usage is asked for, all but the last have it as null, as OpenAI's have."""
        chunk = self._answer(self.chunk_object, choices)
        if self._body.include_usage:
            chunk.usage = None
        return chunk

    def _common(self, index: int, part: Part) -> dict[str, Any]:
        """Fields that choices of all kinds share."""
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

    def _usage(self) -> Usage:
        committed = self._total().committed
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=committed,
            total_tokens=self._prompt_tokens + committed,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens()),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self._reasoning_tokens()),
        )
        original = self._body.original_prompt_tokens
        if original is not None:
            ratio = round(self._prompt_tokens / original, 4)
            usage.prompt_compression = CompressionUsage(
                original_tokens=original, compressed_tokens=self._prompt_tokens, ratio=ratio
            )
        return usage

    def _add_compressed_prompt(self, answer: Answer) -> None:
        if self._body.compressed_prompt is not None:
            answer.compressed_prompt = self._body.compressed_prompt

    def _cached_tokens(self) -> int:
        """Tokens of the prompts that were not computed for any of their answers."""
        count = self._body.choices
        groups = [self._choices[start : start + count] for start in range(0, len(self._choices), count)]
        return sum(min(choice.statistics.cached for choice in group) for group in groups)

    def _reasoning_tokens(self) -> int:
        """Tokens of all answers that belong to reasoning."""
        return 0

    def _total(self) -> Statistics:
        return sum((choice.statistics for choice in self._choices), Statistics())


class CompletionWriter(AnswerWriter):
    """POST /v1/completions."""

    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"
    _body: CompletionRequest

    def _echoed_prompt(self, prompt_index: int, prompt: Sequence[int]) -> EchoedPrompt | None:
        if not self._body.echo:
            return None
        given = self._body.prompt[prompt_index]
        text = given if isinstance(given, str) else self._decoder.decode(given)
        return EchoedPrompt(text, prompt, self._decoder)

    def _choice(self, index: int, part: Part) -> CompletionChoice:
        count = self._body.logprob_count
        logprobs = None if count is None else completion_logprobs(part, count, self._decoder)
        choice = CompletionChoice(text=part.text, logprobs=logprobs, **self._common(index, part))
        of_prompt = self._prompt_logprobs(index, part)
        if of_prompt is not None:
            choice.prompt_logprobs = of_prompt
        return choice

    def _chunk_choices(self, index: int, part: Part, *, first: bool) -> Sequence[CompletionChoice]:
        return [self._choice(index, part)]

    def _add_prompt_logprobs(self, answer: Answer, index: int, part: Part) -> None:
        """Do nothing: the choices have them."""


class ChatWriter(AnswerWriter):
    """POST /v1/chat/completions."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    _body: ChatRequest

    def __init__(
        self, body: ChatRequest, requests: Sequence[Request], decoder: TokenDecoder, *, identity: AnswerIdentity
    ) -> None:
        super().__init__(body, requests, decoder, identity=identity)
        self._prompt = requests[0].prompt
        self._turns = [self._turn() for _ in requests]

    def _turn(self) -> ChatTurn:
        structured = self._body.structure is not None
        return ChatTurn(make_parser(self._body, self._prompt, self._decoder, structured=structured))

    def _choice(self, index: int, part: Part) -> ChatChoice:
        turn = self._turn()
        message = turn.whole(part)
        common = self._common(index, part) | {"finish_reason": turn.finish_reason(part)}
        return ChatChoice(message=message, logprobs=self._logprobs(part), **common)

    def _chunk_choices(self, index: int, part: Part, *, first: bool) -> Sequence[ChatChunkChoice]:
        turn = self._turns[index]
        deltas = turn.pieces(part)
        if first:
            deltas[0].role = "assistant"
        common = self._common(index, part) | {"finish_reason": turn.finish_reason(part)}
        return [
            *(ChatChunkChoice(index=index, finish_reason=None, delta=delta, logprobs=None) for delta in deltas[:-1]),
            ChatChunkChoice(delta=deltas[-1], logprobs=self._logprobs(part), **common),
        ]

    def _reasoning_tokens(self) -> int:
        if self._body.structure is not None:  # such answers have none
            return 0
        parts = [choice.whole() for choice in self._choices]
        return sum(
            reasoning_tokens(self._turn().whole(part).reasoning_content or "", part.tokens, self._decoder)
            for part in parts
        )

    def _logprobs(self, part: Part) -> Json:
        count = self._body.logprob_count
        return None if count is None else chat_logprobs(part, count, self._decoder)

    def _add_prompt_logprobs(self, answer: Answer, index: int, part: Part) -> None:
        logprobs = self._prompt_logprobs(index, part)
        if logprobs is not None:
            answer.prompt_logprobs = logprobs
