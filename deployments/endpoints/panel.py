"""What the members and the writer of a panel read: each in its own tokens, by its own chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from actors.coordinator.request import Delta, Request
from decoding.errors import ContextLengthError, InvalidRequestError
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.events import Text
from deployments.apis.parser import AnswerStream
from deployments.apis.parts import Part
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.prompt_compression import InThread
from deployments.fields.conversation import TextPart
from deployments.fields.ensembles import EnsembleFields
from deployments.fields.generation import ConversationRequest, GenerationRequest
from deployments.fields.sampling import TOKEN_ID_FIELDS
from deployments.strategies.strategy import Proposal, Synthesize

# Fields that count for the writer alone: they describe the one answer that the client gets, or name its tokens.
_WRITERS_OWN = (
    "n",
    "best_of",
    "proposers",
    "draft_length",
    "min_tokens",
    *TOKEN_ID_FIELDS,
    *EnsembleFields.model_fields,
)


def check_panel(body: GenerationRequest, panel: str) -> None:
    """Raise InvalidRequestError if several answers to the body can't become one. panel: the endpoint's name."""
    tools = isinstance(body, ConversationRequest) and bool(body.offered_tools)
    ids = isinstance(body, CompletionRequest) and not all(isinstance(prompt, str) for prompt in body.prompt)
    asks = not isinstance(body, ConversationRequest) or _asks(body)
    for is_wrong, field, problem in (
        (tools, "tools", "calls by several models can't become one; leave them out, or ask one of its models"),
        (body.searches, "use_beam_search", "that is sampled; leave it out"),
        (body.echoes, "echo", "it follows another prompt than the client's; leave it out"),
        (body.prompt_logprobs is not None, "prompt_logprobs", "each of which reads the prompt in its own tokens"),
        (body.weights is not None, "weights", "which all count the same; leave them out"),
        (ids, "prompt", "each of which reads the text in its own tokens; send a text"),
        (not asks, body.prompt_field, "to the user's last message; let the conversation end with it"),
    ):
        if is_wrong:
            reason = f"{field}: the model {panel!r} writes its answer from its members' answers, {problem}."
            raise InvalidRequestError(reason, field=field)


def _asks(body: ConversationRequest) -> bool:
    conversation = body.to_conversation()
    return conversation.messages[-1].role == "user" and not conversation.continue_final_message


class PanelComposer:
    """Writes the requests for one answer. The writer's context holds the prompt, all members' answers, and its own."""

    def __init__(
        self,
        body: GenerationRequest,
        index: int,
        request: Request,
        writer: ServedEndpoint,
        write: Synthesize,
        in_thread: InThread,
    ) -> None:
        """
        index: of the prompt in the body.
        request: for the writer, with that prompt.
        writer: the panel's endpoint. write: its template.
        in_thread: works where the tokenizers are used.
        """
        self.request = request
        self._body, self._index, self._writer, self._write = body, index, writer, write
        self._in_thread = in_thread
        self._room = 0  # tokens of the writer for each of the members' answers
        self._prompts: Mapping[str, Sequence[int]] = {}  # by member

    async def member_requests(self) -> list[Request]:
        """Return the request as each member gets it; raises InvalidRequestError if answers have no room."""
        return await self._in_thread(self._member_requests)

    async def compose(self, proposals: Sequence[Proposal]) -> Request:
        return await self._in_thread(partial(self._compose, proposals))

    def read(self, model: str, delta: Delta) -> str:
        if not isinstance(self._body, ConversationRequest):
            return delta.text.strip()
        member, structured = self._writer.panel[model], self.request.params.structure is not None
        stream = AnswerStream(self._body, self._prompts[model], member.token_decoder, structured=structured)
        events = stream.add(Part(delta.text, finish=delta.finish))
        return "".join(event.text for event in events if isinstance(event, Text)).strip()

    def _member_requests(self) -> list[Request]:
        body, params = self._body.model_copy(update=dict.fromkeys(_WRITERS_OWN)), self.request.params
        count = self._writer.requests_per_answer
        free = self._writer.context_length - len(self._prompt([Proposal("", "")] * count))
        is_wanted = body.wanted_max_tokens is not None and not body.limit_is_upper_bound
        self._room = (free - params.max_tokens) // count if is_wanted else free // (count + 1)
        if self._room < 1:
            field = "max_tokens" if is_wanted else body.prompt_field
            raise self._too_long(field, f"{max(free, 0)} tokens for {count} answers and its own")
        most = min(params.max_tokens, self._room)
        requests = [
            member.member_request(body, self._index, seed=params.seed, max_tokens=most)
            for member in self._writer.panel.values()
        ]
        self._prompts = {request.endpoint.target: request.prompt for request in requests}
        return [self._of_panel(request) for request in requests]

    def _of_panel(self, request: Request) -> Request:
        panel = self.request
        return replace(
            request,
            endpoint=replace(request.endpoint, name=panel.endpoint.name),
            ensemble=panel.ensemble_options,
            timeout_s=panel.timeout_s,
            cache_salt=panel.cache_salt,
        )

    def _compose(self, proposals: Sequence[Proposal]) -> Request:
        prompt = self._prompt([replace(each, text=self._cut(each.text)) for each in proposals])
        room = self._writer.context_length - len(prompt)
        if room < 1:
            raise self._too_long(self._body.prompt_field, "no token for its own answer")
        params = replace(self.request.params, max_tokens=min(self.request.params.max_tokens, room))
        return replace(self.request, prompt=prompt, params=params)

    def _cut(self, text: str) -> str:
        """Return as much of an answer as has room. The member's own limit was in its own tokens."""
        tokenizer = self._writer.encoder.tokenizer
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return text if len(tokens) <= self._room else str(tokenizer.decode(tokens[: self._room])).rstrip("\ufffd")

    def _prompt(self, proposals: Sequence[Proposal]) -> list[int]:
        """Return the tokens that the writer reads. In a chat, what the template writes replaces the last message."""
        body, encoder = self._body, self._writer.encoder
        if isinstance(body, CompletionRequest):
            return encoder.prompt(self._write(str(body.prompt[self._index]), proposals))
        assert isinstance(body, ConversationRequest)
        conversation = body.to_conversation()
        *before, last = conversation.messages
        text = TextPart(type="text", text=self._write(last.text, proposals))
        asked = last.model_copy(update={"content": [text]})
        return encoder.conversation(replace(conversation, messages=[*before, asked]))

    def _too_long(self, field: str, problem: str) -> ContextLengthError:
        length = self._writer.context_length
        reason = f"{field}: the writer's context of {length} tokens leaves {problem}; send a shorter prompt"
        return ContextLengthError(f"{reason} or fewer max_tokens.", field=field)
