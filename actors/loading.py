"""Loads models and tokenizers from a local folder or the Hub, through transformers."""

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from decoding.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model to load, and the room to give it."""

    name: str
    path: str  # a local folder or a Hub id
    revision: str | None = None
    dtype: str = "auto"  # "auto": as stored; else a torch dtype's name
    device: str = "auto"  # "auto": a GPU if there is one, else the CPU; else a torch device
    slots: int = 16  # requests that run at once
    max_length: int = 1024  # tokens per slot, prompt and output
    prefill_chunk: int = 256  # prompt tokens processed between two steps of running requests
    threads: int | None = None  # CPU threads; None: torch's own choice


def load_model(spec: ModelSpec) -> PreTrainedModel:
    """The model on its device.

    Raises:
        ConfigError: the checkpoint can't be found or loaded, or its positions are fewer than `max_length`.
    """
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if spec.device == "auto" else spec.device
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            spec.path, revision=spec.revision, dtype=spec.dtype, device_map={"": device}, use_safetensors=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"models.{spec.name}.path: can't load {spec.path!r}: {error}") from error
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and spec.max_length > positions:
        raise ConfigError(
            f"models.{spec.name}.max_length is {spec.max_length}, but the model has {positions} positions; lower it"
        )
    return model


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a checkpoint.

    Raises:
        ConfigError: there is none, or it can't be loaded.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load the tokenizer of {path!r}: {error}") from error
    return tokenizer
