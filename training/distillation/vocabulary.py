"""The tokens of a target that a student has. Must not know about training.

A trimmed student has a row for each token that it can draft, and a last row for all others
(engine/loading/draft_vocabulary.py).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.loading.draft_vocabulary import DraftVocabulary, load_draft_vocabulary
from engine.loading.settings import is_trimmed, vocabulary_size
from training.texts import Chat


class StudentVocabulary:
    """The target's tokens as a student's rows."""

    def __init__(self, rows: Tensor, drafted: int, *, reads_rows: bool = True) -> None:
        """
        rows: [V] int64, the row of each of the target's tokens.
        drafted: so many rows stand for one token each.
        reads_rows: whether the student reads rows; otherwise it reads the target's tokens.
        """
        self._rows, self._reads_rows = rows, reads_rows
        self.drafted = drafted

    @classmethod
    def of_model(cls, model: PreTrainedModel, folder: str, revision: str | None = None) -> "StudentVocabulary":
        """Return the vocabulary of a model from a folder, or from the Hub.

        Raises:
            ConfigError: it is trimmed, and its file of token ids does not fit.
        """
        size = vocabulary_size(model.config)
        if not is_trimmed(model.config):
            return cls(torch.arange(size), size)
        token_ids = load_draft_vocabulary(folder, model.config, revision)
        return cls(DraftVocabulary(token_ids, size).rows, len(token_ids))

    @property
    def tokens(self) -> Tensor:
        """Return the token of each row that can be drafted, [N] int64."""
        known = (self._rows < self.drafted).nonzero()[:, 0]
        return known[self._rows[known].argsort()]

    @classmethod
    def of_heads(cls, token_ids: Sequence[int], size: int) -> "StudentVocabulary":
        """Return the vocabulary of heads, which read the target's own tokens. size: of the target's vocabulary, V."""
        rows = torch.full((size,), len(token_ids))
        rows[torch.tensor(token_ids)] = torch.arange(len(token_ids))
        return cls(rows, len(token_ids), reads_rows=False)

    def read(self, tokens: Tensor) -> Tensor:
        """Return tokens as the student reads them, int64, of any shape."""
        return self._rows[tokens.long()] if self._reads_rows else tokens.long()

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens can be drafted, bool, and their rows, int64, 0 for the others. Of any shape."""
        rows = self._rows[tokens.long()]
        known = rows < self.drafted
        return known, rows * known


def most_used(chats: Iterable[Chat], count: int, special: Sequence[int]) -> list[int]:
    """Return the special tokens and the `count` tokens that a target writes most, ascending.

    A token counts with its probability at every position, so that few texts tell much. FR-Spec (arXiv 2502.14856)
    keeps the most frequent tokens.
    """
    pairs = [(chat.candidates.flatten().long(), chat.logprobs.flatten().double().exp()) for chat in chats]
    tokens, weights = (torch.cat(column) for column in zip(*pairs, strict=True))
    use = torch.zeros(int(tokens.max()) + 1, dtype=torch.float64).index_add_(0, tokens, weights)
    return sorted({*use.argsort(descending=True, stable=True)[:count].tolist(), *special})
