"""Which replica a request goes to. It knows replicas by name, model and load, and nothing of what they do."""

from actors.addresses import ReplicaAddress
from actors.messages import Report


class _Replica:
    def __init__(self, address: ReplicaAddress, now_s: float) -> None:
        self.address = address
        self.model = address.model
        self.request_ids: set[int] = set()
        self.missing: set[int] = set()  # of these, by the last report
        self.heard_at_s = now_s
        self.reported: Report | None = None

    @property
    def load(self) -> int:
        reported = self.reported.active + self.reported.waiting if self.reported else 0
        return max(len(self.request_ids), reported)  # other coordinators' requests count too


class Placement:
    """The replicas that one coordinator can reach, and which of its requests each works on."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}

    def names(self) -> set[str]:
        return set(self._replicas)

    def models(self) -> set[str]:
        """The models that have at least one replica."""
        return {replica.model for replica in list(self._replicas.values())}  # a copy: other threads ask, too

    def busy(self) -> list[str]:
        """The replicas that work on requests of this coordinator."""
        return [name for name, replica in self._replicas.items() if replica.request_ids]

    def add(self, address: ReplicaAddress, now_s: float) -> None:
        self._replicas[address.name] = _Replica(address, now_s)

    def remove(self, name: str) -> set[int]:
        """Forget a replica; returns the ids of the requests that were placed there."""
        return self._replicas.pop(name).request_ids

    def assign(self, model: str, request_id: int) -> str | None:
        """Place a request on the least loaded replica of the model; None if there is no replica."""
        address = self.choose(model)
        if address is None:
            return None
        self._replicas[address.name].request_ids.add(request_id)
        return address.name

    def choose(self, model: str) -> ReplicaAddress | None:
        """The least loaded replica of the model; None if there is no replica."""
        candidates = [replica for replica in self._replicas.values() if replica.model == model]
        return min(candidates, key=lambda replica: replica.load).address if candidates else None

    def wants_drafts(self, name: str) -> bool:
        """Whether a target would use drafts, by its last report."""
        reported = self._replicas[name].reported
        return reported is None or reported.drafting

    def release(self, name: str | None, request_id: int) -> None:
        if name in self._replicas:
            self._replicas[name].request_ids.discard(request_id)

    def heard(self, name: str, now_s: float, report: Report | None) -> None:
        """Note a sign of life."""
        replica = self._replicas.get(name)
        if replica is not None:
            replica.heard_at_s = now_s
            replica.reported = report or replica.reported

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

    def silent(self, now_s: float, max_silence_s: float) -> list[str]:
        """Replicas that have work of ours and have not been heard of for too long."""
        for replica in self._replicas.values():
            if not replica.request_ids:
                replica.heard_at_s = now_s  # an idle replica has nothing to say
        return [name for name, replica in self._replicas.items() if now_s - replica.heard_at_s > max_silence_s]
