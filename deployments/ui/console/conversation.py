"""What is said so far and to whom, with the settings of the next request. Knows nothing of terminals or HTTP."""

from collections.abc import Mapping, Sequence
from typing import Any

from decoding.errors import UnavailableError, UnknownModelError
from deployments.requests.schema import ChatRequest
from deployments.ui.console.parameters import Parameters
from deployments.ui.console.suggestion import suggestion

Turn = dict[str, str]


class Conversation:
    """The turns of a chat, oldest first, and what the next request says beside them."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.parameters = Parameters(ChatRequest)
        self.system: str | None = None
        self.turns: list[Turn] = []

    @property
    def last_message(self) -> str | None:
        """The user's."""
        return next((turn["content"] for turn in reversed(self.turns) if turn["role"] == "user"), None)

    def drop_last_message(self) -> str | None:
        """Take back the user's last message and its answer; None if there is none."""
        message = self.last_message
        if message is not None:
            while self.turns.pop()["role"] != "user":
                pass
        return message

    def before_last_message(self) -> list[Turn]:
        """The turns without the user's last message and its answer."""
        last = max((i for i, turn in enumerate(self.turns) if turn["role"] == "user"), default=0)
        return self.turns[:last]

    def add(self, message: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

    def request(self, message: str, turns: Sequence[Turn] | None = None) -> dict[str, object]:
        """The body of a request that sends the message after the turns, by default all of them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        said = self.turns if turns is None else turns
        messages = [*system, *said, {"role": "user", "content": message}]
        return {**self.parameters.values, "model": self.model, "messages": messages}


def choose_model(cards: Sequence[Mapping[str, Any]], wanted: str | None) -> Mapping[str, Any]:
    """The card of the model that is wanted, by default the first that is ready.

    Raises:
        UnknownModelError: there is none of that name.
        UnavailableError: there is none at all.
    """
    if wanted is None:
        ready = [card for card in cards if card.get("ready", True)]
        if not cards:
            raise UnavailableError("the server has no models")
        return (ready or cards)[0]
    for card in cards:
        if card["id"] == wanted:
            return card
    known = suggestion(wanted, [card["id"] for card in cards])
    raise UnknownModelError(f"there is no model {wanted!r}; {known}", field="model")
