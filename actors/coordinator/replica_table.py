"""Replicas by model, load and signs of life: where requests go, and which should move.

A prompt goes to a target that has read its beginning already; hashes of a few prefixes tell which targets have. A
replica counts as hung if, for HANG_S, its loop sends nothing and its process passes no health check. If the process is
healthy, the loop may be silent for longer, a multiple of its model's longest silence so far: a slow model's turns are
long.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from actors.wire.messages import ReplicaAddress, Report, WeightsState

_PREFIX_STEP = 16  # tokens: KV caches share whole pages of this size
_MAX_PREFIXES = 32768  # that a table remembers, in about 5 MiB
HANG_S = 4.0  # without any sign of life; a loop reports every second …
_REPORTED_S = 1.5  # … so one that was heard from within this time is alive
_MIN_SILENCE_S = 10.0  # permitted to a healthy replica in any case
_SILENCE_FACTOR = 3.0  # permitted multiple of the longest silence so far
_SILENCE_DECAY = 0.999  # of the longest silence, per update
_MAX_MOVED = 8  # most requests to move at once
_MIN_PREFIX = 128  # tokens of a prompt that a replica must have read to get it despite a load above the mean …
_MAX_OVERLOAD = 1.25  # … but of up to this multiple of the mean, or 2 requests
_REPORTS_TO_SETTLE = 2  # after its requests change; the first report may have been sent before that


class Prefix(NamedTuple):
    """A beginning of a prompt."""

    length: int  # tokens
    key: int  # hash of the tokens and the salt, 64 bits


def prefixes_of(prompt: Sequence[int], salt: str = "") -> tuple[Prefix, ...]:
    """Return prefixes of a prompt, whose lengths grow by a quarter; none if it is shorter than a page."""
    digest = blake2b(salt.encode(), digest_size=8)
    tokens = memoryview(array("q", prompt)).cast("B")
    prefixes, read, length = list[Prefix](), 0, _PREFIX_STEP
    while length <= len(prompt):
        digest.update(tokens[8 * read : 8 * length])
        prefixes.append(Prefix(length, int.from_bytes(digest.digest(), "little")))
        read, length = length, length + max(1, length // (4 * _PREFIX_STEP)) * _PREFIX_STEP
    return tuple(prefixes)


class PrefixTable:
    """The replicas that lately got each prefix. The least recently used prefixes are forgotten first."""

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # by key

    def __len__(self) -> int:
        return len(self._replicas)

    def record(self, prefixes: Sequence[Prefix], replica: str, live: Collection[str]) -> None:
        """Note that a replica reads a prompt. live: names of the replicas to remember; others are forgotten."""
        for _, key in reversed(prefixes):  # so that longer prefixes are forgotten before shorter ones
            others = (name for name in self._replicas.get(key, ()) if name != replica and name in live)
            self._replicas[key] = (*others, replica)
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_prefixes:
            self._replicas.popitem(last=False)

    def match(self, prefixes: Sequence[Prefix]) -> dict[str, int]:
        """Return how many of a prompt's tokens each replica has read, as far as known. Some may be gone."""
        matched: dict[str, int] = {}
        for length, key in prefixes:
            names = self._replicas.get(key)
            if names is None:
                break
            matched.update(dict.fromkeys(names, length))
        return matched


class _Replica:
    def __init__(self, address: ReplicaAddress, now_s: float) -> None:
        self.address = address
        self.model = address.model
        self.request_ids: set[int] = set()
        self.missing: set[int] = set()  # those missing from the last report
        self.wrong_drafters: set[int] = set()  # those with a wrong drafter in the last report
        self.message_at_s = self.healthy_at_s = now_s
        self.report: Report | None = None
        self.reports_to_settle = _REPORTS_TO_SETTLE
        self.leaving = False  # no longer listed, but maybe still at work
        self.suspected = False  # seems to hang or to be cut off

    @property
    def load(self) -> int:
        reported = self.report.active + self.report.waiting if self.report else 0
        return max(len(self.request_ids), reported)  # includes other coordinators' requests

    @property
    def free_slots(self) -> int:
        """Requests that could still run; 0 if unknown."""
        return max(0, self.report.capacity - self.load) if self.report else 0

    @property
    def weights(self) -> WeightsState:
        return WeightsState() if self.report is None else self.report.weights

    @property
    def is_full(self) -> bool:
        return self.report is not None and not self.free_slots

    @property
    def is_available(self) -> bool:
        return not (self.leaving or self.suspected)

    @property
    def is_drained(self) -> bool:
        confirmed = not self.reports_to_settle and self.report is not None and not self.report.request_ids
        return self.leaving and not self.request_ids and confirmed

    def add(self, request_id: int) -> None:
        self.request_ids.add(request_id)
        self.reports_to_settle = _REPORTS_TO_SETTLE

    def discard(self, request_id: int) -> None:
        self.request_ids.discard(request_id)
        self.reports_to_settle = _REPORTS_TO_SETTLE


class ReplicaTable:
    """The replicas that one coordinator can reach, and which of its requests each works on."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._prefixes = PrefixTable()
        self._longest_silence_s: dict[str, float] = {}  # of replicas that turned out to be alive, by model

    def names(self) -> set[str]:
        return set(self._replicas)

    def models(self) -> set[str]:
        """Return the models with at least one listed replica. Any thread may call this."""
        replicas = list(self._replicas.values())  # a copy: the loop's thread changes the original
        return {replica.model for replica in replicas if not replica.leaving}

    def reports(self) -> list[tuple[ReplicaAddress, Report | None]]:
        """Return the listed replicas with their last reports. Any thread may call this."""
        replicas = list(self._replicas.values())
        return [(replica.address, replica.report) for replica in replicas if not replica.leaving]

    def add(self, address: ReplicaAddress, now_s: float) -> None:
        self._replicas[address.name] = _Replica(address, now_s)

    def remove(self, name: str) -> set[int]:
        return self._replicas.pop(name).request_ids

    def model(self, name: str) -> str | None:
        """Return the model of a replica; None: there is none."""
        return self._replicas[name].model if name in self._replicas else None

    def assign(
        self, model: str, request_id: int, prefixes: Sequence[Prefix] = (), version: str | None = None
    ) -> str | None:
        """Assign a request to the best replica of the model. Return its name; None if there is no replica.

        prefixes: of its prompt; none: only the loads count.
        version: of the weights that it needs; None: any.
        """
        address = self.choose(model, prefixes, version)
        if address is None:
            return None
        self._replicas[address.name].add(request_id)
        return address.name

    def choose(self, model: str, prefixes: Sequence[Prefix] = (), version: str | None = None) -> ReplicaAddress | None:
        """Return the replica that has read most of the prompt, of those with room; of equals, the least loaded one.

        A replica has room if it is not full and has at most the mean load, or up to _MAX_OVERLOAD times the mean if it
        has read a long prefix. Rendezvous hashing of the first page breaks ties, so independent coordinators agree
        (Thaler and Ravishankar, 1998). A replica that seems to hang is the last resort. One with other weights comes
        after those with the request's, and one that could not load these is none.
        """
        candidates = [
            replica
            for replica in self._replicas.values()
            if replica.model == model and not replica.leaving and (version is None or replica.weights.unfit != version)
        ]
        if not candidates:
            return None
        available = [replica for replica in candidates if replica.is_available] or candidates
        mean = (sum(replica.load for replica in available) + 1) / len(available)
        matched = self._prefixes.match(prefixes)

        def rank(replica: _Replica) -> tuple[bool, bool, bool, bool, int, int, bytes]:
            name, tokens = replica.address.name, matched.get(replica.address.name, 0)
            limit = math.ceil(mean) if tokens < _MIN_PREFIX else max(2, math.ceil(_MAX_OVERLOAD * mean))
            exceeds = replica.load >= limit
            weight = blake2b(f"{prefixes[0].key} {name}".encode(), digest_size=8).digest() if prefixes else b""
            differs = version is not None and replica.weights.present.version != version
            return (replica.suspected, replica.is_full, exceeds, differs, -tokens, replica.load, weight)

        best = min(candidates, key=rank).address
        self._prefixes.record(prefixes, best.name, self._replicas)
        return best

    def address(self, name: str) -> ReplicaAddress:
        return self._replicas[name].address

    def wants_drafts(self, name: str) -> bool:
        """Whether a target would use drafts, by its last report."""
        report = self._replicas[name].report
        return report is None or report.drafting

    def release(self, name: str | None, request_id: int) -> None:
        if name in self._replicas:
            self._replicas[name].discard(request_id)

    # Signs of life

    def record_message(self, name: str, now_s: float, report: Report | None) -> None:
        """Record a message from a replica's loop: a sign of life and, if it is a report, the replica's load."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        if now_s - replica.healthy_at_s < HANG_S:  # it was slow, not gone
            silence_s = now_s - replica.message_at_s
            self._longest_silence_s[replica.model] = max(silence_s, self._longest_silence_s.get(replica.model, 0.0))
        replica.message_at_s = now_s
        if report is not None:
            replica.report = report
            replica.reports_to_settle = max(0, replica.reports_to_settle - 1)

    def discount_absence(self, seconds: float) -> None:
        for replica in self._replicas.values():
            replica.message_at_s += seconds
            replica.healthy_at_s += seconds

    def set_listed(self, listed: Collection[str], healthy: Collection[str], now_s: float) -> None:
        """Mark replicas that are not listed as leaving. healthy: those that have just passed a health check."""
        for name, replica in self._replicas.items():
            replica.leaving = name not in listed
            if name in healthy:
                replica.healthy_at_s = now_s

    def update_suspicions(self, now_s: float) -> None:
        """Suspect replicas that have been silent for too long, and no others. Call regularly."""
        for replica in self._replicas.values():
            silence_s = now_s - replica.message_at_s
            healthy_limit_s = max(_MIN_SILENCE_S, _SILENCE_FACTOR * self._longest_silence_s.get(replica.model, 0.0))
            limit_s = HANG_S if now_s - replica.healthy_at_s > HANG_S else healthy_limit_s
            replica.suspected = silence_s > limit_s
        self._longest_silence_s = {
            model: _SILENCE_DECAY * silence_s for model, silence_s in self._longest_silence_s.items()
        }

    def timed_out(self, now_s: float, max_silence_s: float) -> list[str]:
        """Return replicas to give up: silent for `max_silence_s`, or leaving and silent for HANG_S."""
        return [
            name
            for name, replica in self._replicas.items()
            if now_s - replica.message_at_s > (HANG_S if replica.leaving else max_silence_s)
        ]

    def drained(self) -> list[str]:
        """Return leaving replicas that have none of our requests, as their own reports confirm."""
        return [name for name, replica in self._replicas.items() if replica.is_drained]

    # Requests to move

    def is_leaving(self, name: str) -> bool:
        return name in self._replicas and self._replicas[name].leaving

    def leaves_alive(self, name: str, now_s: float) -> bool:
        """Whether a leaving replica was heard from just now. A dead one leaves the list, too, but after a silence."""
        return self.is_leaving(name) and now_s - self._replicas[name].message_at_s < _REPORTED_S

    def should_vacate(self, name: str) -> bool:
        """Whether requests should move: the replica leaves or seems to hang, and its model has an available one."""
        replica = self._replicas.get(name)
        if replica is None or replica.is_available:
            return False
        return any(other.is_available and other.model == replica.model for other in self._replicas.values())

    def requests_to_move(self) -> list[tuple[str, int]]:
        names = filter(self.should_vacate, self._replicas)
        return [(name, request_id) for name in names for request_id in self.requests_on(name)]

    def requests_on(self, name: str) -> list[int]:
        return list(self._replicas[name].request_ids)

    def find_imbalance(self, model: str) -> tuple[str, int]:
        """Return the most loaded replica, and how many requests should move to the least loaded one."""
        replicas = self._settled_replicas(model)
        if len(replicas) < 2:
            return "", 0
        least = min(replicas, key=lambda replica: replica.load)
        most = max(replicas, key=lambda replica: replica.load)
        return most.address.name, min((most.load - least.load) // 2, len(most.request_ids), _MAX_MOVED)

    def waiting_requests_to_move(self, model: str) -> list[int]:
        """Return requests that wait for a slot while other replicas have free ones: at most one for each free slot."""
        replicas = self._settled_replicas(model)
        free_slots = sum(replica.free_slots for replica in replicas)
        waiting: list[int] = []
        for replica in replicas:
            if replica.report is not None and replica.report.own_waiting:
                last = replica.report.request_ids[-replica.report.own_waiting :]  # waiting ones come last
                waiting += [request_id for request_id in last if request_id in replica.request_ids]
        return waiting[: min(free_slots, _MAX_MOVED)]

    def _settled_replicas(self, model: str) -> list[_Replica]:
        """Return the available replicas of a model if all their loads are known, else none."""
        replicas = [replica for replica in self._replicas.values() if replica.model == model and replica.is_available]
        return [] if any(replica.reports_to_settle for replica in replicas) else replicas

    # Corrections by reports

    def find_discrepancies(self, name: str, report: Report) -> tuple[set[int], set[int]]:
        """Return requests that a replica should not have, and those that are missing from two reports in a row."""
        replica = self._replicas.get(name)
        if replica is None:
            return set(), set()
        reported = set(report.request_ids)
        missing = replica.request_ids - reported
        lost = missing & replica.missing
        replica.missing = missing - lost
        return reported - replica.request_ids, lost

    def find_wrong_drafters(self, name: str, drafters: Mapping[int, str | None], report: Report) -> set[int]:
        """Return requests for which two reports in a row name a wrong drafter. drafters: the right ones, by request."""
        replica = self._replicas.get(name)
        if replica is None:
            return set()
        wrong = {
            request_id
            for request_id in drafters.keys() & set(report.request_ids)
            if drafters[request_id] != report.attached_drafters.get(request_id)
        }
        confirmed = wrong & replica.wrong_drafters
        replica.wrong_drafters = wrong - confirmed
        return confirmed
