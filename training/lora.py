"""Low-rank adapters of a model's linear layers, through peft (LoRA, arXiv 2106.09685)."""

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from decoding.errors import ConfigError


def add_lora(model: PreTrainedModel, rank: int, *, seed: int) -> PreTrainedModel:
    """Return the model with its weights frozen and trainable adapters in all its linear layers but the last.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("--lora needs peft: pip install 'consort[lora]'") from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # peft initialises from the global generator
        return cast(PreTrainedModel, get_peft_model(model, config))


def merge_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with its adapters added to its weights."""
    adapted: Any = model
    return cast(PreTrainedModel, adapted.merge_and_unload())
