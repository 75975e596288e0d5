"""What a target's loop asks of its rows, whatever their kind: to verify, to answer a leader, to search beams.

Knows nothing of how any of them does it.
"""

from torch import Tensor

from actors.loops.row import Row
from actors.wire.messages import Join, LogitsRequest, Message


class ServedRow(Row):
    """A row of a target. The defaults are those of rows that have no drafts and no leader."""

    invitation = 0  # of a leader, as in Join

    @property
    def verifies(self) -> bool:
        """Whether its next step verifies a draft. Such steps begin together, once no row waits for its draft."""
        return False

    def wait_s(self, now_s: float) -> float:
        """Return how much longer its step should wait for a draft, in seconds."""
        return 0.0

    def take(self, logits: Tensor, rows: range) -> Message | None:
        """Take the logits after what `inputs` returned. Returns what to tell the peer that admitted the row.

        logits: [N, V] float, a step's. rows: those after this row's tokens, as far as they wanted any.
        """
        raise NotImplementedError

    def announce(self) -> Message | None:
        """Return what to tell the peer once the row has read its text; None if that has been sent, or is not wanted."""
        return None

    def rejoins(self, join: Join) -> bool:
        """Whether the row belongs to this invitation, which was sent again. It is then announced again."""
        return False

    def take_request(self, request: LogitsRequest) -> str | None:
        """Take a leader's request for logits. Returns an error text if that is impossible."""
        return "the request is not here"
