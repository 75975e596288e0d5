"""What a target's loop asks of heads of any kind, and what it tells them. Knows nothing of rows or tries."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from decoding.drafts.choice import DraftChoice
from engine.heads.sampling import DraftStart
from engine.heads.spec import HeadsKind
from engine.model.hidden_states import HiddenStates


class Reading(NamedTuple):
    """Tokens of one text that the target has run."""

    slot: int
    start: int  # position of the first
    following: Sequence[int]  # [n] the token after each
    layers_rows: Sequence[int]  # [n] their rows of `HiddenStates.layers`
    last_row: int | None  # the last one's row of `HiddenStates.last`; None: it wanted no logits


class HeadProposer(Protocol):
    """Drafts for all texts of one target at once. A text's state is that of its slot."""

    kind: HeadsKind
    length: int  # the most tokens of a path
    tree: Sequence[Sequence[int]] | None  # paths of ranks to draft; None: those most probably committed
    chained: bool  # whether a token's candidates follow the best ones before it only; otherwise any

    def read(self, readings: Sequence[Reading], hidden: HiddenStates) -> None:
        """Take in what the target ran, before its next forward."""

    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        """Return each text's candidates for its next `length` positions, the best `ranks` of each.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
