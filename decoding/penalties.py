"""Logit bias and penalties for tokens of the text before a position, draft tokens included.

They change the logits of P positions, [P, V] float32, in place.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from decoding.history import Position
from decoding.params import SamplingParams
from decoding.token_lists import Entries, TokenLists
from decoding.transfer import copy_to


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Adds a bias to tokens' logits: OpenAI's `logit_bias`, or transformers' `sequence_bias` of single tokens.

    If a request names a token twice, the later bias counts.
    """

    entries: Entries

    @classmethod
    def build(cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> "LogitBias | None":
        """Build from P positions; None if none has any."""
        lists = TokenLists()
        for history, group in groupby(enumerate(positions), lambda pair: pair[1].history):
            biases = dict(history.params.logit_bias)
            tokens, values = array("q", biases.keys()), array("f", biases.values())
            for row, _ in group:
                lists.add(row, tokens, values)
        return cls(lists.entries(vocab_size, device)) if lists else None

    def apply_(self, logits: Tensor) -> None:
        """Change logits, [P, V], in place."""
        logits[self.entries.rows, self.entries.tokens] += self.entries.values


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Repetition, frequency and presence penalty, in this order.

    The repetition penalty is for tokens of prompt and answer, as in transformers and vLLM: logits below 0 are
    multiplied by it, others divided (Keskar et al., arXiv 1909.05858, section 4.1). The others are for tokens of the
    answer, as in vLLM and OpenAI's API: logit − frequency × count − presence × (count > 0).
    """

    entries: Entries  # the distinct tokens before each position; values: their counts in the answer
    repetition: Tensor  # [P] float32
    frequency: Tensor  # [P] float32
    presence: Tensor  # [P] float32

    @classmethod
    def build(cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> "Penalties | None":
        """Build from P positions; None if none has any."""
        lists = TokenLists()
        for row, (history, path, _) in enumerate(positions):
            if is_penalised(history.params):
                lists.add(row, *history.counts.with_path(path))
        if not lists:
            return None
        params = [position.history.params for position in positions]
        penalties = torch.tensor(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], dtype=torch.float32
        )
        return cls(lists.entries(vocab_size, device), *copy_to(device, penalties.T.contiguous()))

    def apply_(self, logits: Tensor) -> None:
        """Change logits, [P, V], in place."""
        rows, tokens, counts = self.entries
        before = logits[rows, tokens]  # [E]
        repetition = self.repetition[rows]
        after = torch.where(before < 0, before * repetition, before / repetition)
        after -= self.frequency[rows] * counts
        after -= self.presence[rows] * (counts > 0)
        logits[rows, tokens] = after


def is_penalised(params: SamplingParams) -> bool:
    """Whether the request has any of the penalties."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
