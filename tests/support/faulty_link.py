"""A link that drops, doubles and delays messages, and so reorders them: the same ones for the same seed."""

import random
from collections import Counter
from collections.abc import Sequence

from actors.wire.link import Envelope, LocalLink
from actors.wire.messages import Advance, Commit, Message, Offer, ResendRequest

_POLL_S = 0.002  # while something is delayed


class FaultyLink(LocalLink):
    """Applies faults to offers. A fault depends only on the seed, the message, and how often it was sent.

    With `commits`, Commit and Advance have faults, too, except the last Commit. A real link never doubles or delays
    these, but the text must survive even that.
    """

    def __init__(self, link: LocalLink, *, seed: int, commits: bool = False) -> None:
        self.name = link.name
        self.faults: Counter[str] = Counter()
        self._link = link
        self._seed = seed
        self._commits = commits
        self._delayed: list[list] = []  # [turns left, envelope]
        self._seen: Counter[str] = Counter()

    def send(self, peer: str, messages: Sequence[Message]) -> None:
        kept: list[Message] = []
        for message in messages:
            fate = self._fate(message) if isinstance(message, Commit | Advance) else "pass"
            kept += [message] * {"drop": 0, "double": 2}.get(fate, 1)
        self._link.send(peer, kept)

    def receive(self, timeout_s: float) -> list[Envelope]:
        arrived = self._link.receive(min(timeout_s, _POLL_S) if self._delayed else timeout_s)
        envelopes: list[Envelope] = []
        for waiting in self._delayed:
            waiting[0] -= 1
        for envelope in arrived:
            match self._fate(envelope[1]):
                case "pass":
                    envelopes.append(envelope)
                case "double":
                    envelopes += [envelope, envelope]
                case "delay":
                    self._delayed.append([1 + len(str(envelope[1])) % 8, envelope])
                case "drop":
                    pass
        envelopes += [envelope for turns, envelope in self._delayed if turns <= 0]
        self._delayed = [waiting for waiting in self._delayed if waiting[0] > 0]
        return envelopes

    def reaches(self, peer: str) -> bool:
        return self._link.reaches(peer)

    def wake(self) -> None:
        self._link.wake()

    def close(self) -> None:
        self._link.close()

    def _fate(self, message: Message) -> str:
        match message:
            case Offer():
                weights = {"pass": 5, "drop": 2, "double": 1, "delay": 2}
            case Commit(finish=None) | Advance() | ResendRequest() if self._commits:
                weights = {"pass": 18, "drop": 1, "double": 2, "delay": 1}
            case _:
                return "pass"
        text = str(message)
        self._seen[text] += 1  # so that a message that is sent again may get through
        rng = random.Random(f"{self._seed} {self._seen[text]} {text}")
        fate = rng.choices(list(weights), list(weights.values()))[0]
        if fate != "pass":
            self.faults[f"{fate} {type(message).__name__}"] += 1
        return fate
