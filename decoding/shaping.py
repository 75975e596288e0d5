"""What a request makes of its logits before a distribution is shaped from them: the order of transformers' `generate`.

Bias, penalties, forbidden tokens (repeated n-grams, bad words, early ends), allowed tokens, forced tokens, suppressed
tokens, grammar. They act on greedy requests too. Presence and frequency penalty, which `generate` lacks, come right
after the repetition penalty, and grammars last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from decoding.bans import Bans, bad_tokens, bad_words, early_ends, repeated_ngrams, suppressed, suppressed_at_first
from decoding.constraints import AllowedTokens, ForcedTokens, GrammarMasks, forced_token, unpacked
from decoding.history import History, Position
from decoding.params import SamplingParams
from decoding.penalties import LogitBias, Penalties, is_penalised

_Step = LogitBias | Penalties | Bans | AllowedTokens | ForcedTokens | GrammarMasks


def shaped(history: History, positions: Sequence[Position]) -> list[bool]:
    """Whether anything here has to do with the positions, all of one request."""
    if _acts_everywhere(history.params):
        return [True] * len(positions)
    somewhere = _acts_somewhere(history.params)
    return [position.allowed is not None or (somewhere and _acts_here(position)) for position in positions]


def is_never_shaped(params: SamplingParams) -> bool:
    """Whether nothing here has to do with a request, grammars aside."""
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
    early = position.answered < position.history.params.min_tokens
    return early or forced_token(position) is not None or bool(suppressed(position) or suppressed_at_first(position))


@dataclass(frozen=True, slots=True, eq=False)
class Shaping:
    """The work to be done on P positions.

    A position at which everything would be forbidden falls back on the model's own logits, within the strongest of
    its constraints alone: its grammar; or else its forced token; or else its allowed tokens; or else all tokens. A
    constraint that allows nothing is none, and a set whose logits are all −∞ is drawn from evenly.
    """

    positions: Sequence[Position]  # [P]
    steps: Sequence[_Step]

    @classmethod
    def build(cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> "Shaping":
        """From the positions that are shaped."""
        steps = (
            LogitBias.build(positions, vocab_size, device),
            Penalties.build(positions, vocab_size, device),
            Bans.build((repeated_ngrams, bad_words), (bad_tokens, early_ends), positions, vocab_size, device),
            AllowedTokens.build(positions, vocab_size, device),
            ForcedTokens.build(positions, vocab_size, device),
            Bans.build((), (suppressed, suppressed_at_first), positions, vocab_size, device),
            GrammarMasks.build(positions, device),
        )
        return cls(positions, [step for step in steps if step is not None])

    def __call__(self, logits: Tensor) -> Tensor:
        """logits: [P, V] float32; returns the same shape."""
        shaped = logits.clone()
        for step in self.steps:
            step.apply_(shaped)
        if not all(isinstance(step, (LogitBias, Penalties)) for step in self.steps):
            self._revive_(shaped, logits)
        return shaped

    def _revive_(self, shaped: Tensor, logits: Tensor) -> None:
        """Give tokens to the positions that have none left. Both: [P, V]."""
        dead = shaped.amax(dim=-1) == -inf
        for place in dead.nonzero().flatten().tolist():
            possible = _possible(self.positions[place], logits.shape[-1]).to(logits.device)
            kept = logits[place].masked_fill(~possible, -inf)
            shaped[place] = kept if kept.amax() > -inf else torch.zeros_like(kept).masked_fill_(~possible, -inf)


def _possible(position: Position, vocab_size: int) -> Tensor:
    """[V] bool, the tokens within the strongest constraint of a position."""
    possible = torch.zeros(vocab_size, dtype=torch.bool)
    if position.allowed is not None:
        possible = unpacked(position.allowed[None], vocab_size)[0]
    elif (token := forced_token(position)) is not None:
        possible[token : token + 1] = True
    else:
        tokens, _ = position.history.allowed.on("cpu", vocab_size)
        possible[tokens] = True
    return possible if possible.any() else ~possible
