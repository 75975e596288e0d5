"""What is added to tokens' logits, or taken from them: a request's biases, and penalties for tokens that came before.

A position sees the text before it, draft tokens included. Changes [P, V] float32 logits of P positions in place.
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
    """Adds a number to each named token's logit: transformers' `sequence_bias` of single tokens, OpenAI's `logit_bias`.

    If a request names a token twice, the later number counts.
    """

    entries: Entries

    @classmethod
    def build(cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> "LogitBias | None":
        """None if no position has any."""
        lists = TokenLists()
        for history, group in groupby(enumerate(positions), lambda pair: pair[1].history):
            biases = dict(history.params.logit_bias)
            tokens, values = array("q", biases.keys()), array("f", biases.values())
            for place, _ in group:
                lists.add(place, tokens, values)
        return cls(lists.entries(vocab_size, device)) if lists else None

    def apply_(self, logits: Tensor) -> None:
        """logits: [P, V]"""
        logits[self.entries.places, self.entries.tokens] += self.entries.values


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Repetition, frequency and presence penalty, in this order.

    Repetition, of every token of prompt and answer, as transformers and vLLM have it (Keskar et al., arXiv 1909.05858,
    section 4.1): logits below 0 are multiplied by the penalty, others divided. Frequency and presence, of the answer's
    tokens alone, as vLLM and OpenAI's API have it: logit − frequency × how often it came − presence × whether it came.
    """

    entries: Entries  # the distinct tokens before each position; values: how often the answer has them
    repetition: Tensor  # [P] float32
    frequency: Tensor  # [P] float32
    presence: Tensor  # [P] float32

    @classmethod
    def build(cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> "Penalties | None":
        """None if no position has any."""
        lists = TokenLists()
        for place, (history, path, _) in enumerate(positions):
            if is_penalised(history.params):
                lists.add(place, *history.counts.after(path))
        if not lists:
            return None
        params = [position.history.params for position in positions]
        penalties = torch.tensor(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], dtype=torch.float32
        )
        return cls(lists.entries(vocab_size, device), *copy_to(device, penalties.T.contiguous()))

    def apply_(self, logits: Tensor) -> None:
        """logits: [P, V]"""
        places, tokens, counts = self.entries
        before = logits[places, tokens]  # [E]
        repetition = self.repetition[places]
        after = torch.where(before < 0, before * repetition, before / repetition)
        after -= self.frequency[places] * counts
        after -= self.presence[places] * (counts > 0)
        logits[places, tokens] = after


def is_penalised(params: SamplingParams) -> bool:
    """Whether the request has any of the penalties."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
