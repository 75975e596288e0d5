"""The rows of a target, of all kinds, and which of them are ready for what."""

from actors.ensemble.member import MemberRow
from actors.loops.row_table import RowTable
from actors.target.beams import BeamRow
from actors.target.row import TargetRow

ServedRow = TargetRow | MemberRow | BeamRow


class TargetRows(RowTable[ServedRow]):
    """The row table of one target."""

    @property
    def prefilling(self) -> list[ServedRow]:
        """Rows with more pending tokens than a step computes."""
        return [row for row in self if row.prefilling and row.ready]

    @property
    def running(self) -> list[TargetRow]:
        """Rows whose next step may begin."""
        return [row for row in self._target_rows if row.can_step]

    @property
    def blendable(self) -> list[TargetRow]:
        """Rows of ensemble leaders that have the logits of all members."""
        return [row for row in self._target_rows if row.ensemble is not None and row.ensemble.is_complete]

    @property
    def requested(self) -> list[MemberRow]:
        """Members' rows for which a leader waits and that one step can answer."""
        return [row for row in self._member_rows if row.request is not None and row.ready and not row.prefilling]

    @property
    def joining(self) -> list[MemberRow]:
        """Members' rows that are ready, but whose leaders have not been sent a Joined yet."""
        return [row for row in self._member_rows if not row.joined and row.ready and not row.prefilling]

    @property
    def searching(self) -> list[BeamRow]:
        """Beam searches whose prompt is in the cache."""
        return [row for row in self if isinstance(row, BeamRow) and row.ready and not row.prefilling]

    @property
    def _target_rows(self) -> list[TargetRow]:
        return [row for row in self if isinstance(row, TargetRow)]

    @property
    def _member_rows(self) -> list[MemberRow]:
        return [row for row in self if isinstance(row, MemberRow)]
