"""Reads the formula of a request: the prompts of its terms, in the target's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from actors.coordinator.request import Term
from decoding.blending.params import BlendParams
from decoding.errors import ContextLengthError, InvalidRequestError
from deployments.endpoints.encoder import Encoder
from deployments.fields.conversation import Conversation, Message
from deployments.fields.formulas import FormulaFields, TermFields
from deployments.fields.generation import ConversationRequest, GenerationRequest
from deployments.fields.strict import nearest


@dataclass(frozen=True, slots=True)
class Formula:
    """A request's formula: how its terms are added up, and what they read beside the request's own prompt."""

    blend: BlendParams
    terms: Sequence[Term]
    fields: Sequence[str]  # that ask for the terms

    def longest_prompt(self, length: int, field: str) -> tuple[int, str]:
        """Return the length of the longest prompt, and its field. length, field: of the request's own."""
        lengths = [len(term.prompt or ()) for term in self.terms]
        return max([(length, field), *zip(lengths, self.fields, strict=True)], key=itemgetter(0))


class FormulaReader:
    """Reads the formulas of one endpoint. Its methods raise InvalidRequestError that names the key."""

    def __init__(self, encoder: Encoder, endpoint: str, models: Sequence[str], context_length: int) -> None:
        """endpoint: its name. models: those that terms may name, the target first."""
        self._encoder, self._endpoint, self._context_length = encoder, endpoint, context_length
        self._models = models

    def read(self, fields: FormulaFields, body: GenerationRequest, prompt: Sequence[int]) -> Formula:
        """Return the formula of a request. prompt: the request's, in tokens."""
        conversation = body.to_conversation() if isinstance(body, ConversationRequest) else None
        own, *others = fields.expanded(chat=conversation is not None)
        weights = tuple(term.weight for term in (own, *others))
        if not any(weights):
            raise InvalidRequestError("formula.terms: should have a weight that is not 0.", field="formula.terms")
        names = [
            f"formula.terms.{index}" if fields.terms else body.formula_field for index in range(1, len(others) + 1)
        ]
        terms: list[Term] = []
        for name, each in zip(names, others, strict=True):
            terms.append(self._term(each, name, conversation, prompt))
            if any(terms[-1].name == term.name and not term.is_own for term in terms[:-1]):
                raise InvalidRequestError(
                    f"{name}: {terms[-1].name!r} has a term already; it can have one.", field=name
                )
        return Formula(BlendParams(kind="formula", weights=weights, alpha=fields.least_share), terms, names)

    def _term(self, term: TermFields, field: str, conversation: Conversation | None, prompt: Sequence[int]) -> Term:
        is_own = term.model in (None, self._models[0])
        if not is_own and term.model not in self._models:
            reason = f"{field}.model: {term.model!r} is no model of {self._endpoint!r}; "
            raise InvalidRequestError(reason + nearest(term.model or "", self._models), field=f"{field}.model")
        if term.layers and not is_own:
            raise InvalidRequestError(
                f"{field}.layers: are the target's own; leave out model.", field=f"{field}.layers"
            )
        if is_own and not term.change and not term.layers:
            raise InvalidRequestError(f"{field}: reads what the first term does; add up their weights.", field=field)
        tokens = self._prompt(term, field, conversation, prompt) if term.change else None
        if tokens is not None and not 0 < len(tokens) < self._context_length:
            reason = f"{field}: has {len(tokens)} tokens, but should have 1 to {self._context_length - 1}."
            raise ContextLengthError(reason, field=field)
        own_name = f"without {term.without}" if term.without else term.change or f"layers {term.layers}"
        name = own_name if is_own else str(term.model)
        own_prompt = None if tokens is None else tuple(tokens)
        return Term(name=name, is_own=is_own, prompt=own_prompt, layers=tuple(term.layers or ()))

    def _prompt(
        self, term: TermFields, field: str, conversation: Conversation | None, prompt: Sequence[int]
    ) -> list[int]:
        if term.prompt is not None:
            return self._encoder.prompt(term.prompt, field)
        if term.without == "prompt":
            return list(prompt[-1:])
        if term.messages is not None:
            return self._conversation(replace(conversation or Conversation([]), messages=term.messages), field)
        if conversation is None:
            raise InvalidRequestError(f"{field}.{term.change}: is for conversations.", field=f"{field}.{term.change}")
        if term.without == "documents":
            changed, lacking = replace(conversation, documents=()), "documents"
        else:
            system = [] if term.system is None else [Message.model_validate({"role": "system", "content": term.system})]
            rest = [message for message in conversation.messages if message.role not in ("system", "developer")]
            changed, lacking = (
                replace(conversation, messages=[*system, *rest]),
                "system message; give a negative_prompt",
            )
        if term.without and changed == conversation:
            reason = f"{field}: leaves nothing out: the conversation has no {lacking}."
            raise InvalidRequestError(reason, field=field)
        return self._conversation(changed, field)

    def _conversation(self, conversation: Conversation, field: str) -> list[int]:
        try:
            return self._encoder.conversation(conversation)
        except InvalidRequestError as error:  # names the request's messages
            raise type(error)(f"{field}: {error}", field=field) from error
