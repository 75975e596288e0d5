"""Conversations that the server remembers: answers to /v1/responses are kept, and continued by their ids."""

import logging
from collections.abc import Callable

from decoding.errors import InvalidRequestError, UnavailableError, UnknownTurnError
from deployments.apis.responses.request import ResponsesRequest
from deployments.apis.responses.writer import ResponsesWriter
from deployments.configuration.api_keys import ApiKey
from deployments.storage.store import ResponseStore

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

        Raises:
            UnknownTurnError: the key has no such conversation.
            UnavailableError: the store can't be asked.
        """
        if self.store is None:
            if body.previous_response_id is not None:
                raise InvalidRequestError(f"{_FIELD}: {_NOTHING}; send the whole conversation", field=_FIELD)
            if body.store and body.strict:
                raise InvalidRequestError(f"store: {_NOTHING}", field="store")
            return
        body.is_kept = body.store is not False
        if body.previous_response_id is None:
            return
        turns = await self.store.chain(body.previous_response_id, owner=key.name, continues=True)
        if not turns:
            raise UnknownTurnError(f"{_FIELD}: no response {body.previous_response_id!r} is kept", field=_FIELD)
        if turns[0].previous_id is not None:
            raise UnknownTurnError(f"{_FIELD}: the beginning of that conversation is no longer kept", field=_FIELD)
        body.earlier = turns

    async def keep(self, body: ResponsesRequest, key: ApiKey, writer: ResponsesWriter) -> None:
        """Keep a whole answer, if that is wanted and possible; the answer says whether it was."""
        if not body.is_kept or self.store is None:
            return
        try:
            await self.store.put(writer.turn, owner=key.name)
        except UnavailableError as error:
            body.is_kept = False
            self._on_failure()
            _logger.warning("the answer %s is not kept: %s", writer.turn.response_id, error)
