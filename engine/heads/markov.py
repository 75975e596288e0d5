"""The sequential part of DSpark heads (DeepSeek-AI): what the token before adds to the logits of a block's entry.

Its tensors have the names that speculators and the authors' code share.
"""

from typing import Literal

import torch
from torch import Tensor, nn

MarkovKind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """A matrix of rank r from the token before to the logits, which a gate or a recurrent state may change.

    B rows, H features of an entry, W tokens that can be drafted.
    """

    def __init__(self, kind: MarkovKind, rank: int, *, vocab_size: int, outputs: int, hidden_size: int) -> None:
        """vocab_size: the target's. outputs: W."""
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, outputs, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, hidden: Tensor) -> Tensor:
        """Return the state before a block's first drafting entry, [B, r]. hidden: [B, H]."""
        return hidden.new_zeros(len(hidden), self.rank)

    def forward(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is added to an entry's logits, [B, W], and the next state.

        tokens: [B] int64 before the one that the entry drafts. hidden: [B, H] the entry. state: [B, r].
        """
        before = self.markov_w1(tokens).to(hidden.dtype)
        if self.kind == "gated":
            before = torch.sigmoid(self.gate_proj(torch.cat([hidden, before], dim=-1))) * before
        elif self.kind == "rnn":
            joined = torch.cat([state, before, hidden], dim=-1)
            gate, candidate, output = self.joint_proj(joined).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            before = torch.tanh(output)
        return self.markov_w2(before), state
