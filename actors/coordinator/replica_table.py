"""Which replica a request goes to, and which it should leave. It knows replicas by name, model, load and signs of life,
and nothing of what they do.

Two signs of life count. Its loop is *heard* between turns, and a turn of a slow model takes long. Its process *answers*
whoever asks for its health, however long a turn takes. So a replica that does neither hangs, and one that answers may
be silent for longer: for some times as long as replicas of its model have been before.
"""

from collections.abc import Collection, Mapping

from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Report

HANG_S = 4.0  # without any sign of life; a loop reports every second
_SLOW_S = 10.0  # the least that a replica that answers may be silent
_SLOWER = 3.0  # times the longest silence so far
_REMEMBERED = 0.999  # of that, from one look to the next
_MOST_MOVED = 8  # requests, from one replica to another at once
_SETTLING = 2  # reports after a change until loads are compared: the first may have crossed it


class _Replica:
    def __init__(self, address: ReplicaAddress, now_s: float) -> None:
        self.address = address
        self.model = address.model
        self.request_ids: set[int] = set()
        self.missing: set[int] = set()  # of these, by the last report
        self.misled: set[int] = set()  # of these, those with another drafter than they should have, by the last report
        self.heard_at_s = self.answered_at_s = now_s
        self.reported: Report | None = None
        self.settling = _SETTLING
        self.leaving = False  # it is no longer among those that are up, but may still be at work
        self.suspected = False  # it seems to hang, or to be cut off

    @property
    def load(self) -> int:
        reported = self.reported.active + self.reported.waiting if self.reported else 0
        return max(len(self.request_ids), reported)  # other coordinators' requests count too

    @property
    def sound(self) -> bool:
        return not (self.leaving or self.suspected)

    @property
    def is_free(self) -> bool:
        """Whether it has reported since its requests last changed, and named none of ours."""
        return not self.settling and self.reported is not None and not self.reported.request_ids

    def add(self, request_id: int) -> None:
        self.request_ids.add(request_id)
        self.settling = _SETTLING

    def discard(self, request_id: int) -> None:
        self.request_ids.discard(request_id)
        self.settling = _SETTLING


class ReplicaTable:
    """The replicas that one coordinator can reach, and which of its requests each works on."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._longest_s: dict[str, float] = {}  # silences that were none of death, by model

    def names(self) -> set[str]:
        return set(self._replicas)

    def models(self) -> set[str]:
        """The models that have at least one replica."""
        replicas = list(self._replicas.values())  # a copy: other threads ask, too
        return {replica.model for replica in replicas if not replica.leaving}

    def reports(self) -> list[tuple[ReplicaAddress, Report | None]]:
        """The replicas that are up, and what each told last."""
        replicas = list(self._replicas.values())  # a copy: other threads ask, too
        return [(replica.address, replica.reported) for replica in replicas if not replica.leaving]

    def add(self, address: ReplicaAddress, now_s: float) -> None:
        self._replicas[address.name] = _Replica(address, now_s)

    def remove(self, name: str) -> set[int]:
        """Forget a replica; returns the ids of the requests that were placed there."""
        return self._replicas.pop(name).request_ids

    def assign(self, model: str, request_id: int) -> str | None:
        """Place a request on the best replica of the model; None if there is no replica."""
        address = self.choose(model)
        if address is None:
            return None
        self._replicas[address.name].add(request_id)
        return address.name

    def choose(self, model: str) -> ReplicaAddress | None:
        """The least loaded replica of the model, one that seems to hang only if all do; None if there is none."""
        candidates = [one for one in self._replicas.values() if one.model == model and not one.leaving]
        return min(candidates, key=lambda one: (one.suspected, one.load)).address if candidates else None

    def address(self, name: str) -> ReplicaAddress:
        """Where a replica is."""
        return self._replicas[name].address

    def wants_drafts(self, name: str) -> bool:
        """Whether a target would use drafts, by its last report."""
        reported = self._replicas[name].reported
        return reported is None or reported.drafting

    def release(self, name: str | None, request_id: int) -> None:
        if name in self._replicas:
            self._replicas[name].discard(request_id)

    # Signs of life

    def heard(self, name: str, now_s: float, report: Report | None) -> None:
        """Note a sign of life of a replica's loop."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        if now_s - replica.answered_at_s < HANG_S:  # so it was slow, not gone
            silence_s = now_s - replica.heard_at_s
            self._longest_s[replica.model] = max(silence_s, self._longest_s.get(replica.model, 0.0))
        replica.heard_at_s = now_s
        if report is not None:
            replica.reported = report
            replica.settling = max(0, replica.settling - 1)

    def pass_over(self, seconds: float) -> None:
        """Time in which this process could hear nobody is no silence of theirs."""
        for replica in self._replicas.values():
            replica.heard_at_s += seconds
            replica.answered_at_s += seconds

    def are_up(self, wanted: Collection[str], answered: Collection[str], now_s: float) -> None:
        """Which replicas there should be, and which of them have just said that they are well."""
        for name, replica in self._replicas.items():
            replica.leaving = name not in wanted
            if name in answered:
                replica.answered_at_s = now_s

    def look(self, now_s: float) -> None:
        """Suspect those without a sign of life, and no longer those that have given one. To be called regularly."""
        for replica in self._replicas.values():
            silence_s = now_s - replica.heard_at_s
            slow_s = max(_SLOW_S, _SLOWER * self._longest_s.get(replica.model, 0.0))
            limit_s = HANG_S if now_s - replica.answered_at_s > HANG_S else slow_s
            replica.suspected = silence_s > limit_s
        self._longest_s = {model: _REMEMBERED * seconds for model, seconds in self._longest_s.items()}

    def silent(self, now_s: float, max_silence_s: float) -> list[str]:
        """Replicas that are to be given up: silent for too long, or leaving and silent."""
        return [
            name
            for name, replica in self._replicas.items()
            if now_s - replica.heard_at_s > (HANG_S if replica.leaving else max_silence_s)
        ]

    def left(self) -> list[str]:
        """Replicas that are leaving and work on nothing of ours, as they have said themselves."""
        return [
            name
            for name, replica in self._replicas.items()
            if replica.leaving and not replica.request_ids and replica.is_free
        ]

    # Requests that belong elsewhere

    def is_leaving(self, name: str) -> bool:
        return name in self._replicas and self._replicas[name].leaving

    def has_better(self, name: str) -> bool:
        """Whether what is on a replica should move, because it leaves or seems to hang, and a sound one is there."""
        replica = self._replicas.get(name)
        if replica is None or replica.sound:
            return False
        return any(other.sound and other.model == replica.model for other in self._replicas.values())

    def misplaced(self) -> list[tuple[str, int]]:
        """Requests that should move, and the replicas where they are."""
        return [(name, request_id) for name in self._replicas if self.has_better(name) for request_id in self.on(name)]

    def on(self, name: str) -> list[int]:
        """The requests on a replica."""
        return list(self._replicas[name].request_ids)

    def uneven(self, model: str) -> tuple[str, int]:
        """The replica that works on most for us, and how many requests should leave it for the least loaded one."""
        replicas = self._settled(model)
        if len(replicas) < 2:
            return "", 0
        least = min(replicas, key=lambda one: one.load)
        most = max(replicas, key=lambda one: one.load)
        return most.address.name, min((most.load - least.load) // 2, len(most.request_ids), _MOST_MOVED)

    def in_line(self, model: str) -> list[int]:
        """Requests that wait for a slot of one replica while another has slots to spare."""
        replicas = self._settled(model)
        spare = sum(max(0, one.reported.slots - one.load) for one in replicas if one.reported)
        found: list[int] = []
        for replica in replicas:
            if replica.reported is not None and replica.reported.waiting:
                last = replica.reported.request_ids[-replica.reported.waiting :]  # those that wait come last
                found += [request_id for request_id in last if request_id in replica.request_ids]
        return found[: min(spare, _MOST_MOVED)]

    def _settled(self, model: str) -> list[_Replica]:
        """The sound replicas of a model, if all their loads are known; or none."""
        replicas = [one for one in self._replicas.values() if one.model == model and one.sound]
        return [] if any(one.settling for one in replicas) else replicas

    def compare(self, name: str, report: Report) -> tuple[set[int], set[int]]:
        """Requests that the replica has and should not have, and those that two reports in a row lack."""
        replica = self._replicas.get(name)
        if replica is None:
            return set(), set()
        there = set(report.request_ids)
        missing = replica.request_ids - there
        lost = missing & replica.missing
        replica.missing = missing - lost
        return there - replica.request_ids, lost

    def misled(self, name: str, drafters: Mapping[int, str | None], report: Report) -> set[int]:
        """Requests for which two reports in a row name another drafter than they have.

        drafters: of the target's requests.
        """
        replica = self._replicas.get(name)
        if replica is None:
            return set()
        wrong = {
            one for one in report.request_ids if one in drafters and drafters[one] != report.attached_drafters.get(one)
        }
        misled = wrong & replica.misled
        replica.misled = wrong - misled
        return misled
