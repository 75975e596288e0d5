"""The turns of a chat, and the parameters of its next request, which are checked before it is sent."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from decoding.errors import InvalidRequestError, UnavailableError, UnknownModelError
from decoding.sampling.params import SamplingParams
from deployments.apis.chat.request import ChatRequest
from deployments.fields.generation import GenerationRequest
from deployments.fields.strict import nearest, problem_of

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_MANY_TOKENS = 2**31 - 1
_EXAMPLES: dict[str, object] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
_WORDS = {"on": True, "off": False}
_RESERVED = ("model", "messages", "prompt", "stream", "stream_options", "n", "return_token_details", "template")
Turn = dict[str, str]


class Parameters:
    """Fields of one kind of request, except those that the console sets itself."""

    def __init__(self, request: type[GenerationRequest]) -> None:
        self._request = request
        self.values: dict[str, object] = {}

    def names(self) -> list[str]:
        """Return the names of all parameters."""
        return sorted(name for name in self._request.model_fields if name not in _RESERVED)

    def described(self) -> Iterator[tuple[str, str]]:
        """Yield every name with its description."""
        return ((name, self._request.model_fields[name].description or "") for name in self.names())

    def set(self, name: str, text: str) -> object:
        """Set a parameter from text: JSON, on or off, or a string without quotes. null removes it. Returns the value.

        Raises InvalidRequestError if there is no such parameter, or the value is wrong.
        """
        if name in _RESERVED:
            raise InvalidRequestError(f"{name}: the console sets it itself", field=name)
        if name not in self.names():
            raise InvalidRequestError(f"{name}: is not known; {nearest(name, self.names())}", field=name)
        value = self._checked(name, text)
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value
        return value

    def assign(self, assignment: str) -> None:
        """Set a parameter from NAME=VALUE; raises what `set` raises."""
        name, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidRequestError(f"{assignment!r} should be NAME=VALUE, such as temperature=0.6")
        self.set(name.strip(), text.strip())

    def _checked(self, name: str, text: str) -> object:
        """Return the first reading of the text that is valid for the parameter."""
        problems = []
        for value in _readings(text):
            try:
                self._check(name, value)
            except ValidationError as error:
                problems.append(": ".join(problem_of(error)))
            else:
                return value
        raise InvalidRequestError(problems[0], field=name)

    def _check(self, name: str, value: object) -> None:
        field = self._request.prompt_field
        body = {"model": "x", field: _EXAMPLES[field], "stream": True, **self.values, name: value}
        if body.keys() & {"variables", "examples"}:
            body = {**body, "template": "x", field: []}
        self._request.model_validate(body)
        if name in _SAMPLING and isinstance(value, int | float) and not isinstance(value, bool):
            checked: dict[str, Any] = {"max_tokens": _MANY_TOKENS, name: value}
            SamplingParams(**checked)


def as_written(value: object) -> str:
    """Return a value as users write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "the default" if value is None else json.dumps(value, ensure_ascii=False)


def _readings(text: str) -> Iterator[object]:
    with suppress(ValueError):
        yield json.loads(text)
    if text in _WORDS:
        yield _WORDS[text]
    yield text


class Conversation:
    """The turns of a chat, oldest first, with model, system prompt and parameters of the next request."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.parameters = Parameters(ChatRequest)
        self.system: str | None = None
        self.template: Mapping[str, Any] | None = None  # its card, if messages are sent through one
        self.turns: list[Turn] = []

    @property
    def last_message(self) -> str | None:
        """The user's last message, or None."""
        return next((turn["content"] for turn in reversed(self.turns) if turn["role"] == "user"), None)

    def before_last_message(self) -> list[Turn]:
        """Return the turns before the user's last message."""
        last = max((i for i, turn in enumerate(self.turns) if turn["role"] == "user"), default=0)
        return self.turns[:last]

    def add(self, message: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

    def request(self, message: str, turns: Sequence[Turn] | None = None) -> dict[str, object]:
        """Return the body of a request with the message after the turns. turns: None for all."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        earlier = self.turns if turns is None else turns
        body = {**self.parameters.values, "model": self.model}
        if self.template is None:
            return {**body, "messages": [*system, *earlier, {"role": "user", "content": message}]}
        return {**body, "messages": [*system, *earlier], **fill_template(self.template, body, message)}


def fill_template(card: Mapping[str, Any], body: Mapping[str, Any], text: str) -> dict[str, object]:
    """Return the fields that send a text through a template, as its first variable that the body leaves open.

    Raises InvalidRequestError if all its variables are set.
    """
    variables = body.get("variables") or {}
    free = [name for name in card["variables"] if name not in variables and name != "examples"]
    if not free:
        raise InvalidRequestError(
            "variables: all are set, so the template has no room for the message", field="variables"
        )
    return {"template": card["id"], "variables": {**variables, free[0]: text}}


def choose_model(cards: Sequence[Mapping[str, Any]], wanted: str | None) -> Mapping[str, Any]:
    """Return the card of the wanted model; None for the first that is ready.

    Raises UnknownModelError if there is no such model; UnavailableError if there are no models.
    """
    if wanted is None:
        ready = [card for card in cards if card.get("ready", True)]
        if not cards:
            raise UnavailableError("the server has no models")
        return (ready or cards)[0]
    for card in cards:
        if card["id"] == wanted:
            return card
    known = nearest(wanted, [card["id"] for card in cards])
    raise UnknownModelError(f"there is no model {wanted!r}; {known}", field="model")
