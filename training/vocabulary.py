"""The part of a target's vocabulary that a drafter has. Must not know about training.

Row i of the drafter's embedding is token `token_ids[i]` of the target. The last row stands for every other token: it is
read, and never drafted.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.texts import Chat

FILE = "draft_vocabulary.safetensors"


class DraftVocabulary:
    """Maps between a target's tokens and a drafter's rows."""

    def __init__(self, token_ids: Tensor | None) -> None:
        """token_ids: [V] int64, in the order of the rows; None: all, each in its own row."""
        self.token_ids = token_ids
        if token_ids is not None:
            self._rows = torch.full((int(token_ids.max()) + 2,), len(token_ids))
            self._rows[token_ids] = torch.arange(len(token_ids))

    def read(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, the last row for those that the drafter lacks. int64, of any shape."""
        if self.token_ids is None:
            return tokens
        return self._rows[tokens.clamp_max(len(self._rows) - 1)]

    def drafted(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens the drafter can draft, bool, and their rows, 0 for the others. int64, of any shape."""
        rows = self.read(tokens.long())
        if self.token_ids is None:
            return torch.ones_like(rows, dtype=torch.bool), rows
        known = rows < len(self.token_ids)
        return known, rows * known

    def draft_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the tokens that can be drafted, [..., V]."""
        return logits if self.token_ids is None else logits[..., : len(self.token_ids)]

    def save(self, folder: Path) -> None:
        """Write the ids into a model's folder, if they are not all."""
        if self.token_ids is not None:
            save_file({"token_ids": self.token_ids.contiguous()}, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "DraftVocabulary":
        """Read the ids of a model's folder."""
        file = folder / FILE
        return cls(load_file(file)["token_ids"] if file.exists() else None)


def most_used(chats: Iterable[Chat], count: int, special: Sequence[int]) -> Tensor:
    """Return the ids of the special tokens and of the `count` tokens that the target most expects to write, ascending.

    A token counts with its probability at each position, so that few texts say much. FR-Spec (arXiv 2502.14856) keeps
    the most frequent tokens.

    Returns:
        int64, [V]
    """
    columns = [(chat.candidates.flatten().long(), chat.logprobs.flatten().float().exp()) for chat in chats]
    ids = torch.cat([tokens for tokens, _ in columns])
    weights = torch.cat([probabilities for _, probabilities in columns]).double()
    use = torch.zeros(int(ids.max()) + 1, dtype=torch.float64).index_add_(0, ids, weights)
    best = use.argsort(descending=True, stable=True)[:count]
    return torch.cat([best, torch.tensor(list(special), dtype=torch.int64)]).unique()
