"""Sets of tokens outside of which nothing may come at a position.

Changes [P, V] float32 logits of P positions in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.history import Position
from decoding.token_lists import TokenLists
from decoding.transfer import copy_to, tensor_on


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """`allowed_token_ids`: what transformers' `prefix_allowed_tokens_fn` does where it always returns the same tokens.

    If all of them are forbidden already, these are forgiven, and all come with logit 0.
    """

    rows: Tensor  # [M] int64, in 0…P−1
    allowed: Tensor  # [M, V] bool

    @classmethod
    def build(
        cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str
    ) -> "AllowedTokens | None":
        """None if no position has any."""
        lists = TokenLists()
        rows: list[int] = []
        for place, position in enumerate(positions):
            if position.history.params.allowed_token_ids:
                lists.add(len(rows), position.history.params.allowed_token_ids)
                rows.append(place)
        if not rows:
            return None
        entries = lists.entries(vocab_size, device)
        allowed = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        allowed[entries.places, entries.tokens] = True
        return cls(tensor_on(device, rows, torch.int64), allowed)

    def apply_(self, logits: Tensor) -> None:
        """logits: [P, V]"""
        kept = logits[self.rows].masked_fill_(~self.allowed, -inf)  # [M, V]
        none_left = kept.amax(dim=-1, keepdim=True) == -inf
        logits[self.rows] = kept.masked_fill_(self.allowed & none_left, 0.0)


def forced_token(position: Position) -> int | None:
    """The one token that may come: `forced_bos_token_id` first, `forced_eos_token_id` at max_tokens; the latter wins.

    As in transformers, except that there the former acts only after a prompt of one token.
    """
    params = position.history.params
    if position.answered == params.max_tokens - 1 and params.forced_eos_token_id is not None:
        return params.forced_eos_token_id
    return params.forced_bos_token_id if position.answered == 0 else None


@dataclass(frozen=True, slots=True, eq=False)
class ForcedTokens:
    """A token that gets 0 where all others get −∞."""

    rows: Tensor  # [M] int64, in 0…P−1
    tokens: Tensor  # [M] int64

    @classmethod
    def build(cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> "ForcedTokens | None":
        """None if no position has any."""
        forced = [(place, forced_token(position)) for place, position in enumerate(positions)]
        found = [(place, token) for place, token in forced if token is not None and token < vocab_size]
        return cls(*tensor_on(device, found, torch.int64).T) if found else None

    def apply_(self, logits: Tensor) -> None:
        """logits: [P, V]"""
        logits[self.rows] = -inf
        logits[self.rows, self.tokens] = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMasks:
    """What the grammar of a structured answer allows."""

    rows: Tensor  # [M] int64, in 0…P−1
    words: Tensor  # [M, W] int32, a bit per token

    @classmethod
    def build(cls, positions: Sequence[Position], device: torch.device | str) -> "GrammarMasks | None":
        """None if no position has any."""
        masks = [(place, position.allowed) for place, position in enumerate(positions)]
        found = [(place, words) for place, words in masks if words is not None]
        if not found:
            return None
        rows, words = zip(*found, strict=True)
        return cls(tensor_on(device, rows, torch.int64), copy_to(device, torch.stack(words)))

    def apply_(self, logits: Tensor) -> None:
        """logits: [P, V]"""
        logits[self.rows] = logits[self.rows].masked_fill_(~unpacked(self.words, logits.shape[-1]), -inf)


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """[M, V] bool from bit masks, [M, W] int32. Tokens for which there is no bit are not allowed."""
    bits = torch.ones(32, dtype=torch.int32, device=words.device) << torch.arange(32, device=words.device)
    allowed = (words[:, :, None] & bits.int()).bool().flatten(1)  # [M, 32 W]
    return pad(allowed, (0, vocab_size - allowed.shape[1]))
