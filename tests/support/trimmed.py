"""Drafters with a trimmed vocabulary, and full ones that can't draft the same tokens."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.loading.draft_vocabulary import save_draft_vocabulary
from training.pruning import trim_vocabulary


def save_trimmed(model: PreTrainedModel, kept: Sequence[int], folder: Path) -> None:
    """Save what remains of a model with some of its tokens."""
    trim_vocabulary(model, kept).save_pretrained(folder)
    save_draft_vocabulary(kept, folder)


def copied(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy as it would be loaded, with the attention that transformers chooses."""
    copy: PreTrainedModel = type(model)(deepcopy(model.config))
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def masked(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Return the model with −∞ for tokens other than the kept, and the mean of their embeddings for each of them."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    dropped = torch.ones(embedding.num_embeddings, dtype=torch.bool)
    dropped[list(kept)] = False

    def mask(_: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits.masked_fill(dropped, -torch.inf)
        return output

    mean = embedding.weight.detach()[dropped].mean(dim=0)
    embedding.weight.data[dropped] = mean  # the output layer may be the same, but gives these tokens −∞
    model.register_forward_hook(mask)
    return model
