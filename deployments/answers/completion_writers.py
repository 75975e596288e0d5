"""Write answers to completions and chat, whole or in chunks."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from actors.coordinator.request import Delta, Request, Statistics
from deployments.answers.chat_tool_calls import ToolCaller
from deployments.answers.echoed_prompt import Echo
from deployments.answers.ensemble_details import of_progress
from deployments.answers.ensemble_tally import EnsembleTally
from deployments.answers.events import event as sse
from deployments.answers.parts import Choice, Part
from deployments.answers.schema import (
    Answer,
    AnswerChoice,
    ChatChoice,
    ChatChunkChoice,
    ChatMessage,
    ChatPiece,
    CompletionChoice,
    ToolCallPiece,
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
from deployments.requests.schema import ChatRequest, CompletionRequest, GenerationRequest
from deployments.strategies.progress import Outcome, Progress
from deployments.tokenizers.token_decoder import Vocabulary
from deployments.validation.errors import body_of


class AnswerWriter(Writer):
    """Turns the deltas of one HTTP request, which has one or more answers to each of its prompts, into its answer."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(
        self, body: GenerationRequest, requests: Sequence[Request], vocabulary: Vocabulary, *, seed: int
    ) -> None:
        """requests: of every prompt its choices, one prompt after the other."""
        self._body, self._vocabulary, self._seed = body, vocabulary, seed
        self._id = self.id_prefix + secrets.token_hex(12)
        self._created = int(time.time())
        self._ensembles = EnsembleTally(requests, wanted=body.return_members is not False)
        self._prompt_tokens = sum(len(request.prompt) for request in requests[:: body.choices])
        self._prompts_told: dict[int, Json] = {}
        echoes = [self._echo(index, request.prompt) for index, request in enumerate(requests[:: body.choices])]
        self._choices = [self._begin(request, echoes[index // body.choices]) for index, request in enumerate(requests)]

    def begin(self) -> str:
        return ""

    def add(self, index: int, delta: Delta) -> str:
        """Chunks, if there is anything to show. The last one has the statistics."""
        part, first = self._choices[index].add(delta)
        self._ensembles.add(index, delta)
        if not self._body.stream or not (part.text or part.finish or first or (self._by_token and part.tokens)):
            return ""
        choices = self._chunk_choices(index, part, first=first)
        chunks = [self._answer(self.chunk_object, [choice]) for choice in choices]
        self._tell_of_prompt(chunks[-1], index, part)
        if all(choice.finish for choice in self._choices):
            chunks[-1].speculation, chunks[-1].seed = speculation_of(self._total()), self._seed
        return "".join(sse(chunk.json_text()) for chunk in chunks)

    def tell(self, index: int, event: Progress | Outcome) -> str:
        """Of progress a chunk whose text is empty, so that clients that don't know of it go on."""
        if isinstance(event, Outcome):
            self._ensembles.conclude(index, event)
            return ""
        if not self._body.stream:
            return ""
        chunk = self._answer(self.chunk_object, self._chunk_choices(index, Part(), first=False))
        chunk.progress = of_progress(event)
        return sse(chunk.json_text())

    def end(self) -> str:
        chunk = ""
        if self._body.include_usage:
            last = self._answer(self.chunk_object, [])
            last.usage, last.speculation, last.seed = self._usage(), speculation_of(self._total()), self._seed
            chunk = sse(last.json_text())
        return chunk + sse("[DONE]")

    def fail(self, error: Exception) -> str:
        return sse(body_of(error).model_dump_json(), name="error")

    def whole(self) -> dict[str, Any]:
        parts = [choice.whole() for choice in self._returned()]
        answer = self._answer(self.object, [self._choice(index, part) for index, part in enumerate(parts)])
        self._tell_of_prompt(answer, 0, parts[0])
        answer.usage, answer.speculation, answer.seed = self._usage(), speculation_of(self._total()), self._seed
        return answer.document()

    @abstractmethod
    def _choice(self, index: int, part: Part) -> AnswerChoice:
        """A whole answer's choice."""

    @abstractmethod
    def _chunk_choices(self, index: int, part: Part, *, first: bool) -> Sequence[AnswerChoice]:
        """Of one chunk or several, a choice each; first: no chunk of this index came before."""

    def _echo(self, prompt_index: int, prompt: Sequence[int]) -> Echo | None:
        """What begins the answers to a prompt, if something should."""
        return None

    @abstractmethod
    def _tell_of_prompt(self, answer: Answer, index: int, part: Part) -> None:
        """Where the answer itself, not its choices, tells of the prompt's tokens."""

    @property
    def _by_token(self) -> bool:
        return self._body.logprob_count is not None or bool(self._body.return_token_details)

    def _begin(self, request: Request, echo: Echo | None) -> Choice:
        return Choice(
            request,
            self._vocabulary,
            by_token=self._by_token,
            echo=echo,
            prompt_only=self._body.prompt_only,
        )

    def _returned(self) -> list[Choice]:
        """The `n` best of every prompt's choices; all in their order if there are no more."""
        made, wanted = self._body.choices, self._body.n or 1
        if made == wanted:
            return self._choices
        groups = [self._choices[at : at + made] for at in range(0, len(self._choices), made)]
        return [
            choice
            for group in groups
            for choice in sorted(group, key=lambda choice: choice.mean_logprob, reverse=True)[:wanted]
        ]

    def _answer(self, kind: str, choices: Sequence[AnswerChoice]) -> Answer:
        return Answer(id=self._id, object=kind, created=self._created, model=self._body.model, choices=choices)

    def _common(self, index: int, part: Part) -> dict[str, Any]:
        """Fields of a choice that all kinds have."""
        fields: dict[str, Any] = {"index": index, "finish_reason": part.finish}
        if part.finish is not None:
            fields["stop_reason"] = part.stop_reason
            told = self._ensembles.of(index)
            if told is not None:
                fields["ensemble"] = told
        if part.score is not None:
            fields["score"] = part.score
        if self._body.return_token_details:
            fields["token_details"] = token_details(part)
        return fields

    def _prompt_logprobs(self, index: int, part: Part) -> Json:
        """If they were asked for and the part has them. All choices of a prompt have the same."""
        count, prompt = self._body.prompt_logprobs, index // (self._body.n or 1)
        if count is None or part.prompt_logprobs is None:
            return None
        if prompt not in self._prompts_told:
            self._prompts_told[prompt] = prompt_logprobs(part.prompt_logprobs, count, self._vocabulary)
        return self._prompts_told[prompt]

    def _usage(self) -> Usage:
        committed = self._total().committed
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=committed,
            total_tokens=self._prompt_tokens + committed,
        )

    def _total(self) -> Statistics:
        return sum((choice.statistics for choice in self._choices), Statistics())


class CompletionWriter(AnswerWriter):
    """POST /v1/completions."""

    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"
    _body: CompletionRequest

    def _echo(self, prompt_index: int, prompt: Sequence[int]) -> Echo | None:
        if not self._body.echo:
            return None
        given = self._body.prompt[prompt_index]
        return Echo(given if isinstance(given, str) else self._vocabulary.decode(given), prompt, self._vocabulary)

    def _choice(self, index: int, part: Part) -> CompletionChoice:
        count = self._body.logprob_count
        logprobs = None if count is None else completion_logprobs(part, count, self._vocabulary)
        choice = CompletionChoice(text=part.text, logprobs=logprobs, **self._common(index, part))
        told = self._prompt_logprobs(index, part)
        if told is not None:
            choice.prompt_logprobs = told
        return choice

    def _chunk_choices(self, index: int, part: Part, *, first: bool) -> Sequence[CompletionChoice]:
        return [self._choice(index, part)]

    def _tell_of_prompt(self, answer: Answer, index: int, part: Part) -> None:
        """Its choices do."""


class ChatWriter(AnswerWriter):
    """POST /v1/chat/completions."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    _body: ChatRequest

    def __init__(self, body: ChatRequest, requests: Sequence[Request], vocabulary: Vocabulary, *, seed: int) -> None:
        super().__init__(body, requests, vocabulary, seed=seed)
        self._callers = [ToolCaller(body, vocabulary.tool_format) for _ in requests]

    def _choice(self, index: int, part: Part) -> ChatChoice:
        caller = ToolCaller(self._body, self._vocabulary.tool_format)  # choices may come in another order
        content, calls = caller.whole(part)
        message = ChatMessage(role="assistant", content=None if calls and not content else content)
        if calls:
            message.tool_calls = calls
        common = caller.told(self._common(index, part))
        return ChatChoice(message=message, logprobs=self._logprobs(part), **common)

    def _chunk_choices(self, index: int, part: Part, *, first: bool) -> Sequence[ChatChunkChoice]:
        caller = self._callers[index]
        deltas = [_chat_piece(*piece) for piece in caller.pieces(part)]
        if first:
            deltas[0].role = "assistant"
        common = caller.told(self._common(index, part))
        return [
            *(ChatChunkChoice(index=index, finish_reason=None, delta=one, logprobs=None) for one in deltas[:-1]),
            ChatChunkChoice(delta=deltas[-1], logprobs=self._logprobs(part), **common),
        ]

    def _logprobs(self, part: Part) -> Json:
        count = self._body.logprob_count
        return None if count is None else chat_logprobs(part, count, self._vocabulary)

    def _tell_of_prompt(self, answer: Answer, index: int, part: Part) -> None:
        told = self._prompt_logprobs(index, part)
        if told is not None:
            answer.prompt_logprobs = told


def _chat_piece(content: str, calls: list[ToolCallPiece]) -> ChatPiece:
    return ChatPiece(content=content, tool_calls=calls) if calls else ChatPiece(content=content)
