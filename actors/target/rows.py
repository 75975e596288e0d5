"""A target's rows, of all kinds, and which of them can do what now."""

from actors.ensemble.member import MemberRow
from actors.loops.row_table import RowTable
from actors.target.beams import BeamRow
from actors.target.row import TargetRow

ServedRow = TargetRow | MemberRow | BeamRow


class TargetRows(RowTable[ServedRow]):
    """Of one target."""

    @property
    def prefilling(self) -> list[ServedRow]:
        """Those that have more to read than a step does."""
        return [row for row in self if row.prefilling and row.ready]

    @property
    def running(self) -> list[TargetRow]:
        """Those whose next step may begin."""
        return [row for row in self._own if row.can_step]

    @property
    def complete(self) -> list[TargetRow]:
        """The leaders whose members have all answered."""
        return [row for row in self._own if row.ensemble is not None and row.ensemble.complete]

    @property
    def asked(self) -> list[MemberRow]:
        """Those whose leaders wait for an answer that one step gives."""
        return [row for row in self._members if row.ask is not None and row.ready and not row.prefilling]

    @property
    def joining(self) -> list[MemberRow]:
        """Those whose leaders don't know yet that they are ready."""
        return [row for row in self._members if not row.joined and row.ready and not row.prefilling]

    @property
    def searching(self) -> list[BeamRow]:
        """Those whose beams go on."""
        return [row for row in self if isinstance(row, BeamRow) and row.ready and not row.prefilling]

    @property
    def _own(self) -> list[TargetRow]:
        return [row for row in self if isinstance(row, TargetRow)]

    @property
    def _members(self) -> list[MemberRow]:
        return [row for row in self if isinstance(row, MemberRow)]
