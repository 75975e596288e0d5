"""The rows of a target, of all kinds, and which of those that write a text are ready for what."""

from collections.abc import Callable, Iterable

from actors.loops.row import RowKey, ServedRow
from actors.loops.row_table import RowTable
from actors.loops.scheduler import Share
from actors.verifier.row import TargetRow, Verification
from engine.model.page_tables import PageTables


class TargetRows(RowTable[ServedRow]):
    """The row table of one target."""

    def __init__(self, cache: PageTables, removed: Callable[[ServedRow], None] = lambda row: None) -> None:
        super().__init__(cache, removed)
        self._writers: dict[RowKey, TargetRow] = {}

    def add_writer(self, row: TargetRow) -> None:
        """Add a row that writes a text. Replaces a row of the same key."""
        self.add(row)
        self._writers[row.key] = row

    def remove(self, key: RowKey) -> None:
        self._writers.pop(key, None)
        super().remove(key)

    def writer(self, key: RowKey) -> TargetRow | None:
        return self._writers.get(key)

    @property
    def writers(self) -> list[TargetRow]:
        """All rows that write a text, waiting ones included."""
        return list(self._writers.values())

    @property
    def readers(self) -> list[ServedRow]:
        """Rows with a slot that are not writers."""
        return [row for key, row in self._active.items() if key not in self._writers]

    @property
    def running(self) -> list[TargetRow]:
        """Rows whose next step may begin."""
        return [row for row in self._writers.values() if row.slot >= 0 and row.verifies]

    @property
    def blendable(self) -> list[TargetRow]:
        """Rows of ensemble leaders that have the logits of all members."""
        leaders = [row for row in self._writers.values() if row.ensemble is not None]
        return [row for row in leaders if row.slot >= 0 and row.ensemble is not None and row.ensemble.is_complete]

    def sampling(self, shares: Iterable[Share[ServedRow]]) -> list[TargetRow]:
        """Return the rows that choose tokens after these shares."""
        writers = [(self._writers.get(row.key), limit, is_chunk) for row, limit, is_chunk in shares]
        return [row for row, limit, is_chunk in writers if row and (not is_chunk or row.ends_prompt(limit))]

    def verifying(self, shares: Iterable[Share[ServedRow]]) -> list[TargetRow]:
        """Return the rows whose drafts these shares verify."""
        writers = [self._writers.get(share.row.key) for share in shares if not share.is_chunk]
        return [row for row in writers if row is not None]

    def verifications(self, shares: Iterable[Share[ServedRow]]) -> list[Verification]:
        """Take what the rows of these shares have to verify."""
        rows = [self._writers.get(share.row.key) for share in shares]
        return [verification for row in rows if row and (verification := row.claim_verification()) is not None]
