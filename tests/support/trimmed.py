"""Drafters with a trimmed vocabulary, and full ones that can't draft the same tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from actors.loading.draft_vocabulary import save_draft_vocabulary
from training.pruning import trim_vocabulary


def save_trimmed(model: PreTrainedModel, kept: Sequence[int], folder: Path) -> None:
    """Save what remains of a model with some of its tokens."""
    trim_vocabulary(model, kept).save_pretrained(folder)
    save_draft_vocabulary(kept, folder)


def masked(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Return the model with −∞ for tokens other than the kept, and the mean of their embeddings for each of them."""
    embedding = model.get_input_embeddings().weight
    dropped = torch.ones(len(embedding), dtype=torch.bool)
    dropped[list(kept)] = False

    def mask(_: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits.masked_fill(dropped, -torch.inf)
        return output

    mean = embedding.detach()[dropped].mean(dim=0)
    embedding.data[dropped] = mean  # the output layer may be the same, but gives these tokens −∞
    model.register_forward_hook(mask)
    return model
