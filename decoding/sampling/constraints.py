"""Constraints that allow only certain tokens at a position: allowed tokens, a forced token, a grammar.

They change the logits of P positions, [P, V] float32, in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.sampling.history import Position
from decoding.sampling.token_lists import Span, find_spans
from decoding.sampling.transfer import copy_to, tensor_on


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """`allowed_token_ids`: transformers' `prefix_allowed_tokens_fn` with a constant result.

    If all allowed tokens are forbidden already, they get logit 0.
    """

    spans: Sequence[Span]

    @classmethod
    def build(
        cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str
    ) -> "AllowedTokens | None":
        """Build from P positions; None if none has any."""
        spans = list(find_spans([position.history.allowed for position in positions], vocab_size, device))
        return cls(spans) if spans else None

    def apply_(self, logits: Tensor) -> None:
        """Change logits, [P, V], in place."""
        for start, end, tokens, _ in self.spans:
            rows = logits[start:end]
            kept = rows.index_select(1, tokens)  # [n, E]
            none_left = (kept == -inf).all(dim=-1, keepdim=True)
            rows.fill_(-inf).index_copy_(1, tokens, kept.masked_fill_(none_left, 0.0))


def forced_token(position: Position) -> int | None:
    """Return the only token allowed, if any: `forced_bos_token_id` first, `forced_eos_token_id` at max_tokens.

    If both apply, the end token wins. In transformers the first one acts only after a prompt of one token.
    """
    params = position.history.params
    if position.answer_length == params.max_tokens - 1 and params.forced_eos_token_id is not None:
        return params.forced_eos_token_id
    return params.forced_bos_token_id if position.answer_length == 0 else None


@dataclass(frozen=True, slots=True, eq=False)
class ForcedTokens:
    """Gives the forced token logit 0, and all others −∞."""

    rows: Tensor  # [M] int64, in 0…P−1
    tokens: Tensor  # [M] int64

    @classmethod
    def build(cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> "ForcedTokens | None":
        """Build from P positions; None if none has any."""
        tokens = map(forced_token, positions)
        forced = [(row, token) for row, token in enumerate(tokens) if token is not None and token < vocab_size]
        return cls(*tensor_on(device, forced, torch.int64).T) if forced else None

    def apply_(self, logits: Tensor) -> None:
        """Change logits, [P, V], in place."""
        logits[self.rows] = -inf
        logits[self.rows, self.tokens] = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMasks:
    """Tokens that the grammar of a structured answer allows."""

    rows: Tensor  # [M] int64, in 0…P−1
    words: Tensor  # [M, W] int32, a bit per token

    @classmethod
    def build(cls, positions: Sequence[Position], device: torch.device | str) -> "GrammarMasks | None":
        """Build from P positions; None if none has any."""
        masks = [(row, position.allowed) for row, position in enumerate(positions) if position.allowed is not None]
        if not masks:
            return None
        rows, words = zip(*masks, strict=True)
        return cls(tensor_on(device, rows, torch.int64), copy_to(device, torch.stack(words)))

    def apply_(self, logits: Tensor) -> None:
        """Change logits, [P, V], in place."""
        logits[self.rows] = logits[self.rows].masked_fill_(~unpack_bits(self.words, logits.shape[-1]), -inf)


def unpack_bits(words: Tensor, vocab_size: int) -> Tensor:
    """Return [M, V] bool from bit masks, [M, W] int32. Tokens without a bit are not allowed."""
    bits = torch.ones(32, dtype=torch.int32, device=words.device) << torch.arange(32, device=words.device)
    allowed = (words[:, :, None] & bits.int()).bool().flatten(1)  # [M, 32 W]
    return pad(allowed, (0, vocab_size - allowed.shape[1]))
