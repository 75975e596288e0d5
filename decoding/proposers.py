"""What a proposer is that needs no process of its own: one object per request, asked after every commit.

A drafter is none: it runs ahead on a device of its own, and its offers come when they come (actors/drafter.py).
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from decoding.drafts import Draft


class Proposer(Protocol):
    """Drafts for one request: n-gram look-up (decoding/ngram.py), or heads on the target's hidden state."""

    def propose(self, tokens: Sequence[int], hidden: Tensor | None = None) -> Draft:
        """What may follow the text, with the chances that `DraftTrie.offer` takes: each, should those above hold.

        Args:
            tokens: the request's, prompt included; from one call to the next it only grows.
            hidden: [H] the target's last hidden state at the last position it ran, for proposers that want it.
        """
        ...
