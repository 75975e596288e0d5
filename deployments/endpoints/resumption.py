"""Which streams can go on after an event that the client names."""

from decoding.errors import InvalidRequestError
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.resumable import LAST_EVENT_ID, NO_EVENT, EventId
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.fields.generation import GenerationRequest


def may_resume(body: GenerationRequest, served: ServedEndpoint) -> bool:
    """Whether the answer is a stream whose text depends on the request and its seed alone, event by event."""
    if not body.stream or type(body) not in (CompletionRequest, ChatRequest):
        return False
    verification = body.verification or served.config.verification
    return served.strategy is None and verification == "coupled"


def last_event(header: str | None, body: GenerationRequest, *, resumable: bool) -> EventId | None:
    """Return the last event that the client has; None: it has none.

    Raises:
        InvalidRequestError: the header is no id of an event, or not of this request.
    """
    if header in (None, NO_EVENT):
        return None
    if not resumable:
        raise InvalidRequestError(f"{LAST_EVENT_ID}: this answer can't go on after an event", field=LAST_EVENT_ID)
    event = EventId.parse(header)
    if body.seed is not None and body.seed_or_new() != event.identity.seed and body.seed != -1:
        raise InvalidRequestError(
            f"{LAST_EVENT_ID}: is of a request with the seed {event.identity.seed}", field=LAST_EVENT_ID
        )
    return event
