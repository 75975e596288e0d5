"""A drafter as a student: a causal language model of its own. Must not know how it is trained."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from training.distillation.lessons import Batch
from training.distillation.vocabulary import StudentVocabulary

_BETAS = (0.9, 0.95)
_DECAY = 0.01


class DrafterStudent:
    """A `Student`. Along the teacher's text its draft of a token depends on the text alone, so one step says all."""

    def __init__(self, model: PreTrainedModel, vocabulary: StudentVocabulary) -> None:
        self.module: nn.Module = model
        self.vocabulary = vocabulary

    def steps(self, share: float) -> int:
        """Return 1."""
        return 1

    def optimizers(self, learning_rate: float) -> list[Optimizer]:
        """Return one AdamW."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        return [AdamW(trained, lr=learning_rate, betas=_BETAS, weight_decay=_DECAY, fused=True)]

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Student`."""
        logits = counted_logits(module, batch.tokens, batch.counted)[:, : self.vocabulary.drafted]
        for step in range(steps):
            starts = batch.starts(step)
            yield starts, logits if step == 0 else logits[starts + step]


def counted_logits(model: nn.Module, tokens: Tensor, counted: Tensor) -> Tensor:
    """Return the logits where an answer's token follows, [N, V]. The output layer computes no others.

    tokens: [B, T] int64, rows of the model's vocabulary. counted: [B, T] bool.
    """
    inner: Any = getattr(model, "module", model)
    head = inner.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][counted],))
    try:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()
    return logits
