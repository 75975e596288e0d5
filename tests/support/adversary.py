"""An adversarial drafter: wrong tokens, invalid tokens, stale and future bases, arbitrary trees."""

import random
from collections.abc import Mapping

from actors.wire.link import Link, Outbox
from actors.wire.messages import Admit, Advance, Offer, ReplicaAddress


class AdversarialDrafter:
    """Replaces `actors.drafter.loop.Drafter`. Some offers begin with true tokens, so that the target verifies them."""

    def __init__(self, link: Link, texts: Mapping[int, list[int]], *, vocab_size: int, seed: int) -> None:
        """texts: the true text of each request, prompt included, by request id."""
        self._link = link
        self._outbox = Outbox(link)
        self._texts = texts
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._committed: dict[int, int] = {}
        self._targets: dict[int, str] = {}

    def turn(self) -> None:
        """Send a few offers after each Admit and Advance."""
        for peer, message in self._link.receive(1.0):
            match message:
                case Admit(request_id, tokens, target=ReplicaAddress(target)):
                    self._targets[request_id] = target
                    self._committed[request_id] = len(tokens)
                    coordinator = peer
                case Advance(request_id, coordinator, base=base, tokens=tokens):
                    self._committed[request_id] = base + len(tokens)
                case _:
                    continue
            for _ in range(3):
                offer = self._offer(coordinator, request_id, self._committed[request_id])
                self._outbox.put(self._targets[request_id], offer)
        self._outbox.flush()

    def _offer(self, coordinator: str, request_id: int, committed: int) -> Offer:
        rng = self._random
        base = max(0, committed + rng.choice([0, 0, 0, 0, -1, -7, 1, 5]))
        right = self._texts[request_id][base : base + rng.choice([0, 0, 1, 2, 5])]
        wrong = [rng.randrange(self._vocab_size) for _ in range(rng.choice([1, 1, 2, 9, 30]))]
        if rng.random() < 0.2:
            wrong[-1] = rng.choice([self._vocab_size, self._vocab_size + 7, 2**40, -1])
        tokens = [*right, *wrong]
        if rng.random() < 0.5:
            return Offer(request_id, base, tokens, coordinator=coordinator)
        parents = [rng.randrange(max(-1, index - 3), index) for index in range(len(tokens))]
        parents[: len(right)] = range(-1, len(right) - 1)
        probabilities = [rng.uniform(-0.1, 1.1) for _ in tokens]
        return Offer(request_id, base, tokens, parents, probabilities, coordinator=coordinator)
