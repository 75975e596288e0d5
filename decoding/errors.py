"""All errors that Consort raises on purpose.

ConsortError
├── InvalidRequestError     the caller's request can't be served as it is; names the field (HTTP 400)
│   ├── ContextLengthError  prompt and answer don't fit into the model's context
│   ├── UnknownModelError   no endpoint of that name (HTTP 404)
│   └── UnknownTurnError    no conversation to continue is kept under that id (HTTP 404)
├── ConfigError             the configuration can't work; names the key and the fix
├── OverloadedError         the bounded queue is full; try again later (HTTP 429)
├── DeadlineError           the request took longer than it was given (HTTP 408)
├── OutOfPagesError         the KV cache is full; internal: loops preempt a row
└── UnavailableError        no replica could serve the request in time (HTTP 503)
"""

from typing import Literal

Bound = Literal[
    "max_requests",
    "max_tokens",
    "max_queue_wait_s",
    "key_max_requests",
    "key_max_tokens",
    "key_requests_per_minute",
    "key_tokens_per_minute",
]


class ConsortError(Exception):
    """Base of all errors."""


class InvalidRequestError(ConsortError, ValueError):
    """A request that can't be served as it is. `field` names what to change; None: the request as a whole."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def require(holds: bool, field: str, given: object, expected: str) -> None:
    """Check a value of a request.

    Raises InvalidRequestError if `holds` is false. The message names the field and the expected value.
    """
    if not holds:
        raise InvalidRequestError(f"{field} must be {expected}, not {given!r}.", field=field)


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with the answer that was asked for, is longer than the model's context."""


class UnknownModelError(InvalidRequestError):
    """The request names an endpoint that is not configured."""


class UnknownTurnError(InvalidRequestError):
    """The request continues a conversation that is not kept, or no longer."""


class ConfigError(ConsortError, ValueError):
    """A configuration that can't work."""


class OverloadedError(ConsortError):
    """The queue is full. `retry_after_s`: seconds to wait before a retry. `bound`: the limit that was reached."""

    def __init__(self, message: str, *, retry_after_s: int = 1, bound: Bound = "max_requests") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.bound = bound


class DeadlineError(ConsortError):
    """The request took longer than it was given."""


class OutOfPagesError(ConsortError):
    """More KV pages are needed than are free or can be evicted. Internal: loops catch it and preempt a row."""


class UnavailableError(ConsortError):
    """No replica could serve the request in time. `retry_after_s`: seconds to wait before a retry."""

    def __init__(self, message: str = "", *, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
