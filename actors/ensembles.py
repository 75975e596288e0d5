"""A target as the leader of ensembles: invites members, asks them about drafts, gathers what they answer.

Nobody waits: while members think, the leader serves other requests, ensembles that it is a member of among them.
"""

from collections.abc import Callable

import torch

from actors.link import ConnectingLink
from actors.messages import Answer, Ask, Cancel, Ensemble, Failed, Join, Joined, Lost, Message
from actors.packed_logits import LogitsTransport, unpack
from actors.row_ensemble import RowEnsemble
from actors.target_row import TargetRow
from decoding.errors import ConsortError, UnavailableError

Send = Callable[[str, Message], None]
FromMember = Joined | Answer | Lost | Failed  # or about one


class Ensembles:
    """Those that one target leads. Requests are known by their ids, which are unique among all coordinators."""

    def __init__(self, link: ConnectingLink, send: Send, device: torch.device) -> None:
        """device: where the leader's logits are."""
        self._link, self._send, self._device = link, send, device
        self._rows: dict[int, TargetRow] = {}
        self._connected: set[str] = set()

    def begin(self, row: TargetRow, ensemble: Ensemble, now_s: float) -> None:
        """Invite the members of a new row's ensemble."""
        row.ensemble = RowEnsemble(ensemble, now_s)
        row.ensemble.told = len(row.tokens)
        self._rows[row.key[1]] = row
        for member in ensemble.members:
            if member.address is not None:
                if member.address.name not in self._connected:
                    self._link.connect(member.address)
                    self._connected.add(member.address.name)
                self._send(member.address.name, Join(row.key[1], row.tokens))

    def ask(self, row: TargetRow, ensemble: RowEnsemble) -> None:
        """Send the round that has begun to the other members."""
        assert ensemble.round is not None
        draft = ensemble.round.draft
        ask = Ask(
            request_id=row.key[1],
            step=ensemble.round.step,
            base=ensemble.told,
            text=row.tokens[ensemble.told :],
            tokens=draft.tokens,
            parents=draft.parents,
            transport=LogitsTransport(ensemble.options.member_dtype, ensemble.options.member_top_k),
        )
        ensemble.told = len(row.tokens)
        for replica in ensemble.others:
            self._send(replica, ask)

    def take(
        self, replica: str, message: Joined | Answer | Lost | Failed, now_s: float
    ) -> tuple[TargetRow, ConsortError] | None:
        """What a member says. Returns the row that must fail because of it, and why."""
        row = self._rows.get(message.request_id)
        if row is None or row.ensemble is None:
            return None
        try:
            match message:
                case Joined():
                    row.ensemble.join(replica)
                case Answer(_, step, logits):
                    row.ensemble.take(replica, step, unpack(logits, self._device), now_s)
                case Lost(_, lost):
                    row.ensemble.lose(lost, "is gone")
                case Failed(_, error):
                    row.ensemble.lose(replica, f"failed: {error}")
        except ConsortError as error:
            return row, error
        except ValueError as error:
            return row, UnavailableError(f"a member's answer makes no sense: {error}")
        return None

    def give_up_late(self, now_s: float) -> list[tuple[TargetRow, ConsortError]]:
        """Go on without members that took too long. Returns the rows that can't, and why."""
        failed: list[tuple[TargetRow, ConsortError]] = []
        for row in self._rows.values():
            assert row.ensemble is not None
            for replica in row.ensemble.overdue(now_s):
                try:
                    row.ensemble.lose(replica, "took too long")
                except UnavailableError as error:
                    failed.append((row, error))
        return failed

    def leave(self, row: TargetRow) -> None:
        """The row is gone; so are its members' rows."""
        self._rows.pop(row.key[1], None)
        if row.ensemble is not None:
            for replica in row.ensemble.others:
                self._send(replica, Cancel(row.key[1]))
