"""Conversations that the server remembers: answers to /v1/responses are kept, and continued by their ids."""

import logging
from collections.abc import Callable

from decoding.errors import InvalidRequestError, UnavailableError, UnknownTurnError
from deployments.apis.responses.request import ResponsesRequest, kept_item
from deployments.apis.responses.writer import ResponsesWriter
from deployments.configuration.api_keys import ApiKey
from deployments.storage.store import ResponseStore, Turn, response_id_of

_NOTHING = "no responses are kept here: responses.store says where"
_FIELD = "previous_response_id"
_logger = logging.getLogger(__name__)


class Conversations:
    """The conversations of all API keys, each of which sees its own."""

    def __init__(self, store: ResponseStore | None, on_failure: Callable[[], None]) -> None:
        """
        store: None: nothing is kept.
        on_failure: called for each answer that could not be kept.
        """
        self.store, self._on_failure = store, on_failure

    async def resume(self, body: ResponsesRequest, key: ApiKey) -> None:
        """Give a request the conversation that it continues, and decide whether its answer will be kept.

        Raises InvalidRequestError if it needs what is kept, and nothing is; UnknownTurnError if the key has no such
        conversation, or no such item. Raises UnavailableError if the store can't be asked.
        """
        references = [item.id for item in body.input if item.type == "item_reference" and item.id is not None]
        if self.store is None:
            if body.previous_response_id is not None:
                raise InvalidRequestError(f"{_FIELD}: {_NOTHING}; send the whole conversation", field=_FIELD)
            if references:
                raise InvalidRequestError(f"input: {_NOTHING}; send items themselves", field="input")
            if body.store and body.strict:
                raise InvalidRequestError(f"store: {_NOTHING}", field="store")
            return
        body.memory.is_kept = body.store is not False
        if body.previous_response_id is not None:
            body.memory.earlier = await self._conversation(self.store, body.previous_response_id, key)
        if references:
            turns = await self.store.turns_of(dict.fromkeys(map(response_id_of, references)), owner=key.name)
            body.memory.referenced = turns
            items = {item["id"]: item for turn in turns for item in turn.output}
            missing = next((reference for reference in references if reference not in items), None)
            if missing is not None:
                raise UnknownTurnError(f"input: no item {missing!r} is kept", field="input")
            body.input = [
                item if item.type != "item_reference" else kept_item(items[str(item.id)]) for item in body.input
            ]

    async def _conversation(self, store: ResponseStore, response_id: str, key: ApiKey) -> list[Turn]:
        turns = await store.chain(response_id, owner=key.name, continues=True)
        if not turns:
            raise UnknownTurnError(f"{_FIELD}: no response {response_id!r} is kept", field=_FIELD)
        if turns[0].previous_id is not None:
            raise UnknownTurnError(f"{_FIELD}: the beginning of that conversation is no longer kept", field=_FIELD)
        return turns

    async def keep(self, body: ResponsesRequest, key: ApiKey, writer: ResponsesWriter) -> None:
        """Keep a whole answer, if that is wanted and possible; the answer says whether it was."""
        if not body.memory.is_kept or self.store is None:
            return
        try:
            await self.store.put(writer.turn, owner=key.name)
        except UnavailableError as error:
            body.memory.is_kept = False
            self._on_failure()
            _logger.warning("the answer %s is not kept: %s", writer.turn.response_id, error)
