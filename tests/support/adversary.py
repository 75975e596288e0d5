"""A drafter that does its worst: wrong tokens, tokens that don't exist, stale and future bases, any length."""

import random
from collections.abc import Mapping

from actors.link import Link, Outbox
from actors.messages import Admit, Cancel, Commit, Offer


class AdversarialDrafter:
    """Stands in for `actors.drafter.Drafter`. Some offers begin with the true continuation, so that it gets in."""

    def __init__(self, link: Link, texts: Mapping[int, list[int]], *, vocab_size: int, seed: int) -> None:
        """texts: the whole true text of each request, prompt included, by request id."""
        self.offers = 0
        self._link = link
        self._outbox = Outbox(link)
        self._texts = texts
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._committed: dict[tuple[str, int], int] = {}

    def turn(self) -> None:
        for peer, message in self._link.receive(0.001 if self._committed else 1.0):
            key = (peer, message.request_id) if isinstance(message, Admit | Cancel | Commit) else None
            match message:
                case Admit(_, tokens):
                    assert key is not None
                    self._committed[key] = len(tokens)
                case Commit(_, base, tokens) if key in self._committed:
                    self._committed[key] = base + len(tokens)
                case Cancel() if key is not None:
                    self._committed.pop(key, None)
        for (peer, request_id), committed in self._committed.items():
            for _ in range(2):
                self._outbox.put(peer, self._offer(request_id, committed))
                self.offers += 1
        self._outbox.flush()

    def _offer(self, request_id: int, committed: int) -> Offer:
        chance = self._random
        base = max(0, committed + chance.choice([0, 0, 0, 0, -1, -7, 1, 5]))
        right = self._texts[request_id][base : base + chance.choice([0, 0, 1, 2, 5])]
        wrong = [chance.randrange(self._vocab_size) for _ in range(chance.choice([1, 1, 2, 9, 30]))]
        if chance.random() < 0.2:
            wrong[-1] = chance.choice([self._vocab_size, self._vocab_size + 7, 2**40, -1])
        return Offer(request_id, base, [*right, *wrong])
