"""The interface of proposers that run in the target's process: one object per request, asked after every commit.

Drafters do not implement it: they run ahead on a device of their own (actors/drafter/loop.py).
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from decoding.drafts.trie import Draft


class Proposer(Protocol):
    """Drafts for one request: n-gram look-up (decoding/drafts/ngram.py), or heads on the target's hidden state."""

    def propose(self, tokens: Sequence[int], hidden: Tensor | None = None) -> Draft:
        """Propose a draft that follows the text. Its probabilities are conditional, as in `DraftTrie.offer`.

        Args:
            tokens: the request's, prompt included. They only grow from call to call.
            hidden: [H] the target's hidden state of the last layer, at the last position that it ran.
        """
        ...
