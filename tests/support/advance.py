"""Makes Advance messages for requests of a coordinator named "coordinator"."""

from collections.abc import Sequence

from actors.wire.messages import Advance


def advance(
    request_id: int,
    base: int,
    tokens: Sequence[int],
    draft_length: int = 4,
    *,
    admission: int = 0,
    rejected_at: int = 0,
) -> Advance:
    return Advance(request_id, "coordinator", admission, base, list(tokens), draft_length, rejected_at)
