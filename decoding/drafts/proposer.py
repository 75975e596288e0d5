"""Who drafts, and the interface of proposers without a model: one object per request, asked after every commit.

Drafters do not implement it: they run ahead on a device of their own (actors/drafter/loop.py). Nor do heads on the
target's hidden states, which draft for all requests at once (engine/heads/proposer.py).
"""

from collections.abc import Sequence
from typing import Protocol

from decoding.drafts.draft import Draft, ProposerName


class Proposer(Protocol):
    """Drafts for one request, such as n-gram look-up (decoding/drafts/ngram.py)."""

    name: ProposerName

    def read(self, tokens: Sequence[int], most: int) -> int:
        """Prepare for at most so many tokens of a text, from turn to turn. Returns how many of them were new.

        Args:
            tokens: as in `propose`.
            most: how many a turn has time for.
        """
        ...

    def propose(self, tokens: Sequence[int]) -> Draft:
        """Propose a draft that follows the text. Its probabilities are conditional, as in `DraftTrie.offer`.

        Args:
            tokens: the request's, prompt included. They only grow from call to call.
        """
        ...
