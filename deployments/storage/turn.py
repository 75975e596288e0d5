"""One request of a conversation with its answer, as it is kept."""

from typing import Any

import msgspec


def response_id_of(item_id: str) -> str:
    """Return the id of the response that an item of an output belongs to: it begins the item's own."""
    return f"resp_{item_id.partition('_')[2][:24]}"


class Turn(msgspec.Struct, frozen=True):
    """One request to /v1/responses with its answer. Items are OpenAI's, as JSON."""

    response: dict[str, Any]  # as it was answered
    input: list[dict[str, Any]]  # the request's own items, each with an id
    lead: list[int] = []  # token ids that the prompt ended with
    tokens: list[int] = []  # of the answer

    @property
    def response_id(self) -> str:
        return str(self.response["id"])

    @property
    def previous_id(self) -> str | None:
        """Id of the turn that this one continues; None: it begins its conversation."""
        previous: str | None = self.response["previous_response_id"]
        return previous

    @property
    def output(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.response["output"]
        return items
