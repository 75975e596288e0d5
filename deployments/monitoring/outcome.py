"""How a request ended, in one word for the access log and the metrics. Knows no HTTP."""

from dataclasses import dataclass

from decoding.errors import DeadlineError, InvalidRequestError, OverloadedError, UnavailableError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. `reason`: None if it was answered."""

    reason: str | None = None
    refused: bool = False  # for want of room, with 429

    @staticmethod
    def from_error(error: Exception) -> "Outcome":
        """Return the outcome of a request that ended with the error."""
        match error:
            case OverloadedError():
                return Outcome(error.bound, refused=True)
            case DeadlineError():
                return Outcome("timeout")
            case UnavailableError():
                return Outcome("unavailable")
            case InvalidRequestError():
                return Outcome("invalid_request")
            case _:
                return Outcome("internal_error")


ANSWERED = Outcome()
ABORTED = Outcome("aborted")  # its client hung up
