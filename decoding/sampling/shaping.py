"""Logits processors that depend on the text, in the order of transformers' `generate`. They act on greedy requests too.

Bias, penalties, forbidden tokens (repeated n-grams, bad words, early ends), allowed tokens, forced tokens, suppressed
tokens. Presence and frequency penalty, which `generate` lacks, follow the repetition penalty; grammars come last.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from decoding.sampling.bans import (
    Bans,
    bad_tokens,
    bad_words,
    begin_suppressed_tokens,
    early_end_tokens,
    repeated_ngrams,
    suppressed_tokens,
)
from decoding.sampling.constraints import AllowedTokens, ForcedTokens, GrammarMasks, forced_token, unpack_bits
from decoding.sampling.history import Position, Positions
from decoding.sampling.penalties import LogitBias, Penalties
from decoding.sampling.text_table import TextTables
from decoding.sampling.transfer import tensor_on

_Penalty = LogitBias | Penalties
_Constraint = Bans | AllowedTokens | ForcedTokens | GrammarMasks


def is_shaped(request: Positions) -> bool:
    """Whether any processor may act on the positions."""
    return request.allowed is not None or request.history.traits.is_shaped


def _is_constrained(request: Positions | Position) -> bool:
    return request.allowed is not None or request.history.traits.may_forbid


@dataclass(frozen=True, slots=True, eq=False)
class Shaping:
    """The processors of N positions.

    A position at which they forbid every token gets the model's logits back, within its strongest constraint: grammar,
    else forced token, else allowed tokens, else all tokens. A constraint that allows nothing is ignored. If all logits
    within it are −∞, its tokens are equally probable.
    """

    penalties: Sequence[_Penalty]
    constraints: Sequence[_Constraint]
    positions: Sequence[Position]  # [N]; [0] without constraints
    constrained: Tensor  # [M] int64, the positions at which a constraint may act

    @classmethod
    def build(
        cls, requests: Sequence[Positions], vocab_size: int, device: torch.device | str, tables: TextTables
    ) -> "Shaping | None":
        """Build from the positions of requests, N in all; None if no processor acts. tables: as in `Penalties`."""
        penalties = (
            LogitBias.build(requests, vocab_size, device),
            Penalties.build(requests, vocab_size, device, tables),
        )
        constraints: tuple[_Constraint | None, ...] = ()
        positions: list[Position] = []
        if any(map(_is_constrained, requests)):
            positions = [position for request in requests for position in request.singly()]
            constraints = (
                Bans.build((repeated_ngrams, bad_words), (bad_tokens, early_end_tokens), positions, vocab_size, device),
                AllowedTokens.build(positions, vocab_size, device),
                ForcedTokens.build(positions, vocab_size, device),
                Bans.build((), (suppressed_tokens, begin_suppressed_tokens), positions, vocab_size, device),
                GrammarMasks.build(positions, device),
            )
        acting = [step for step in penalties if step is not None], [step for step in constraints if step is not None]
        if not any(acting):
            return None
        rows = [row for row, position in enumerate(positions) if _is_constrained(position)]
        return cls(*acting, positions, tensor_on(device, rows, torch.int64))

    def __call__(self, logits: Tensor) -> Tensor:
        """Process logits, [N, V] float32; returns the same shape."""
        shaped = logits.clone()
        for step in (*self.penalties, *self.constraints):
            step.apply_(shaped)
        if self.constraints:
            self._restore_(shaped, logits)
        return shaped

    @contextmanager
    def applied(self, logits: Tensor) -> Iterator[Tensor]:
        """Yield the processed logits, [N, V]. Without constraints that takes no copy: the change is undone at the end.

        logits: [N, V] float32, no two elements at one address.
        """
        if self.constraints:
            yield self(logits)
            return
        before = [step.apply_(logits) for step in self.penalties]
        yield logits
        for step, values in zip(reversed(self.penalties), reversed(before), strict=True):
            step.undo_(logits, values)

    def _restore_(self, shaped: Tensor, logits: Tensor) -> None:
        """Restore positions at which every token is forbidden. Both: [N, V]."""
        everywhere = len(self.constrained) == len(shaped)
        dead = (shaped if everywhere else shaped[self.constrained]).amax(dim=-1) == -inf
        for row in self.constrained[dead].tolist():
            possible = _possible(self.positions[row], logits.shape[-1]).to(logits.device)
            kept = logits[row].masked_fill(~possible, -inf)
            shaped[row] = kept if kept.amax() > -inf else torch.zeros_like(kept).masked_fill_(~possible, -inf)


def _possible(position: Position, vocab_size: int) -> Tensor:
    """Return the tokens within the strongest constraint of a position, [V] bool."""
    possible = torch.zeros(vocab_size, dtype=torch.bool)
    if position.allowed is not None:
        possible = unpack_bits(position.allowed[None], vocab_size)[0]
    elif (token := forced_token(position)) is not None:
        possible[token : token + 1] = True
    else:
        tokens, _ = position.history.allowed.copy_to("cpu", vocab_size)
        possible[tokens] = True
    return possible if possible.any() else ~possible
