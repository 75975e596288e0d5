"""The turns of a chat and the settings of its next request. Must not know terminals or HTTP."""

from collections.abc import Mapping, Sequence
from typing import Any

from cli.console.parameters import Parameters
from decoding.errors import InvalidRequestError, UnavailableError, UnknownModelError
from deployments.apis.chat.request import ChatRequest
from deployments.fields.strict import nearest

Turn = dict[str, str]


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

    Raises:
        InvalidRequestError: all its variables are set.
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

    Raises:
        UnknownModelError: there is no such model.
        UnavailableError: there are no models.
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
