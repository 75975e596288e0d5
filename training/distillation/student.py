"""What a distillation asks of a student: its weights, how they are trained, and what it drafts.

Must not know any kind of student.
"""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from training.distillation.lessons import Batch
from training.distillation.vocabulary import StudentVocabulary


class Student(Protocol):
    """A network that drafts tokens of its teacher."""

    module: nn.Module
    vocabulary: StudentVocabulary  # of the tokens that it drafts

    def steps(self, share: float) -> int:
        """Return the tokens of a draft that it is trained on, where that share of the training is over."""

    def optimizers(self, learning_rate: float) -> list[Optimizer]:
        """Return the optimizers of all weights that are trained."""

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the starts and logits of the first, second, … token of the drafts from all starts of a batch.

        A start is the index of the answer token, of N, that a draft's first token stands for; step s of it stands for
        the answer token s later. At most `steps` pairs: [n] int64 ascending, and [n, W] over the student's rows.

        Args:
            module: `self.module`, which may be wrapped.
        """
