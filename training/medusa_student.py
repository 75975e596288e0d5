"""Medusa's heads as a student: how they draft while trained, and their files. W rows of the output layer."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from engine.heads.medusa import MedusaHeads
from training.distillation.lessons import Batch, StudentVocabulary
from training.files import write_checkpoint
from training.head_starts import BETAS

_RATE = 0.05  # in parts of the learning rate, which is that of other heads


class MedusaStudent:
    """A `Student` whose module reads the target's last hidden state. The target's output layer stays as it is."""

    def __init__(self, heads: MedusaHeads, norm: nn.Module, output_rows: Tensor, vocabulary: StudentVocabulary) -> None:
        """
        norm: the target's last, between its last layer and its output layer.
        output_rows: [W, H] of the target's output layer, for the tokens of the vocabulary.
        """
        self.heads = heads
        self.module: nn.Module = _WithOutput(heads, norm, output_rows)
        self.vocabulary = vocabulary

    def steps(self, share: float) -> int:
        return self.heads.count

    def optimizers(self, learning_rate: float) -> list[Optimizer]:
        return [AdamW(self.heads.parameters(), lr=_RATE * learning_rate, betas=BETAS, weight_decay=0.0, fused=True)]

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """No draft starts with an answer's first token: the target has run no token of the answer."""
        starts = [each[~batch.first[each]] for each in map(batch.starts, range(min(steps, self.heads.count)))]
        if not len(starts[0]):
            return  # no text has a second token, and the heads don't run on nothing
        assert batch.features is not None
        cells = batch.counted.flatten().nonzero()[starts[0], 0] - 1  # [n]
        logits = module(batch.features.flatten(0, 1)[cells])  # [K, n, W]
        for each, of_head in zip(starts, logits, strict=False):
            yield each, of_head[torch.isin(starts[0], each)]


class _WithOutput(nn.Module):
    """The heads between the target's last layer and some rows of its output layer."""

    output_rows: Tensor  # [W, H]

    def __init__(self, heads: MedusaHeads, norm: nn.Module, output_rows: Tensor) -> None:
        super().__init__()
        self.heads = heads
        self._norm: Sequence[nn.Module] = (norm,)  # in a sequence: it is not of this module, nor of its checkpoints
        self.register_buffer("output_rows", output_rows, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return [K, n, W] logits. features: [n, k · H], whose last H are the last layer's output."""
        size = self.output_rows.shape[1]
        with torch.no_grad():
            hidden = self._norm[0](features[:, -size:]).to(self.heads.weight.dtype)
        logits: Tensor = self.heads(hidden, partial(functional.linear, weight=self.output_rows))
        return logits


def save_medusa(heads: MedusaHeads, target: str, folder: Path) -> None:
    """Write heads of one layer each, bfloat16, in the format of Medusa's version 2."""
    tensors: dict[str, Tensor] = {}
    for head in range(heads.count):
        tensors[f"{head}.0.linear.weight"] = heads.weight[head, 0]
        tensors[f"{head}.0.linear.bias"] = heads.bias[head, 0]
    config: dict[str, object] = {
        "version": "2",
        "medusa_num_heads": heads.count,
        "medusa_num_layers": 1,
        "hidden_size": heads.weight.shape[-1],
        "base_model_name_or_path": target,
    }
    write_checkpoint(tensors, config, folder)
