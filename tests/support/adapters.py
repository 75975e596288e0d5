"""Random LoRA adapters in peft's format, and the models that peft makes of them."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel


def save_adapter(folder: Path, model: PreTrainedModel, seed: int, **config: Any) -> PreTrainedModel:
    """Save an adapter with random weights, large enough to change every text. Returns the model with it, unmerged.

    model: gets the adapter's layers. config: of peft's `LoraConfig`.
    """
    settings: dict[str, Any] = {
        "r": 4,
        "target_modules": "all-linear",
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks for a deprecated name, and says what it sets by itself
        torch.manual_seed(seed)  # peft initialises from it
        adapted: Any = get_peft_model(model, LoraConfig(**settings | config))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.2, generator=generator)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    saved: PreTrainedModel = adapted.eval()
    return saved
