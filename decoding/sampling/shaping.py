"""Logits processors that depend on the text, in the order of transformers' `generate`. They act on greedy requests too.

Bias, penalties, forbidden tokens (repeated n-grams, bad words, early ends), allowed tokens, forced tokens, suppressed
tokens. Presence and frequency penalty, which `generate` lacks, follow the repetition penalty; grammars come last.
"""

from collections.abc import Sequence
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
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.penalties import LogitBias, Penalties, is_penalised

_Step = LogitBias | Penalties | Bans | AllowedTokens | ForcedTokens | GrammarMasks


def needs_shaping(history: History, positions: Sequence[Position]) -> list[bool]:
    """Whether any processor acts on each of the positions, [P], all of one request."""
    if _acts_everywhere(history.params):
        return [True] * len(positions)
    may_act = _acts_somewhere(history.params)
    return [position.allowed is not None or (may_act and _acts_here(position)) for position in positions]


def never_needs_shaping(params: SamplingParams) -> bool:
    """Whether no processor acts on any position of a request, grammars aside."""
    return not (_acts_everywhere(params) or _acts_somewhere(params))


def _acts_everywhere(params: SamplingParams) -> bool:
    return is_penalised(params) or bool(
        params.logit_bias
        or params.no_repeat_ngram_size
        or params.bad_words_ids
        or params.allowed_token_ids
        or params.suppress_tokens
    )


def _acts_somewhere(params: SamplingParams) -> bool:
    forced = params.forced_bos_token_id is not None or params.forced_eos_token_id is not None
    return forced or bool(params.min_tokens or params.begin_suppress_tokens)


def _acts_here(position: Position) -> bool:
    early = position.answer_length < position.history.params.min_tokens
    return (
        early
        or forced_token(position) is not None
        or bool(suppressed_tokens(position) or begin_suppressed_tokens(position))
    )


@dataclass(frozen=True, slots=True, eq=False)
class Shaping:
    """The processors of P positions.

    A position at which they forbid every token gets the model's logits back, within its strongest constraint: grammar,
    else forced token, else allowed tokens, else all tokens. A constraint that allows nothing is ignored. If all logits
    within it are −∞, its tokens are equally probable.
    """

    positions: Sequence[Position]  # [P]
    steps: Sequence[_Step]

    @classmethod
    def build(cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> "Shaping":
        """Build from the positions that need it."""
        steps = (
            LogitBias.build(positions, vocab_size, device),
            Penalties.build(positions, vocab_size, device),
            Bans.build((repeated_ngrams, bad_words), (bad_tokens, early_end_tokens), positions, vocab_size, device),
            AllowedTokens.build(positions, vocab_size, device),
            ForcedTokens.build(positions, vocab_size, device),
            Bans.build((), (suppressed_tokens, begin_suppressed_tokens), positions, vocab_size, device),
            GrammarMasks.build(positions, device),
        )
        return cls(positions, [step for step in steps if step is not None])

    def __call__(self, logits: Tensor) -> Tensor:
        """Process logits, [P, V] float32; returns the same shape."""
        shaped = logits.clone()
        for step in self.steps:
            step.apply_(shaped)
        if not all(isinstance(step, (LogitBias, Penalties)) for step in self.steps):
            self._restore_(shaped, logits)
        return shaped

    def _restore_(self, shaped: Tensor, logits: Tensor) -> None:
        """Restore positions at which every token is forbidden. Both: [P, V]."""
        dead = shaped.amax(dim=-1) == -inf
        for row in dead.nonzero().flatten().tolist():
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
