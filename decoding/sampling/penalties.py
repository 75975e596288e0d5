"""Logit bias and penalties for tokens of the text before a position, draft tokens included.

They change the logits of P positions, [P, V] float32, in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.sampling.history import Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.token_lists import Entries, Span, TokenLists, find_spans
from decoding.sampling.transfer import copy_to


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Adds a bias to tokens' logits: OpenAI's `logit_bias`, or transformers' `sequence_bias` of single tokens.

    If a request names a token twice, the later bias counts.
    """

    spans: Sequence[Span]

    @classmethod
    def build(cls, positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> "LogitBias | None":
        """Build from P positions; None if none has any."""
        spans = list(find_spans([position.history.biases for position in positions], vocab_size, device))
        return cls(spans) if spans else None

    def apply_(self, logits: Tensor) -> None:
        """Change logits, [P, V], in place."""
        for start, end, tokens, values in self.spans:
            logits[start:end, tokens] += values


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Repetition, frequency and presence penalty, in this order.

    The repetition penalty applies to tokens of prompt and answer, as in transformers and vLLM: it multiplies logits
    below 0 and divides others (Keskar et al., arXiv 1909.05858, section 4.1). The other two apply to tokens of the
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
    """Whether the request has any of the three penalties."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
