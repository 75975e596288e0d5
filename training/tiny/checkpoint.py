"""Creates models, and writes model folders atomically. Must not know about training."""

from copy import deepcopy
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.files import whole_folder
from training.tiny.tokenizer import CONTEXT, VOCABULARY

HEAD = 64


def build(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    kv_heads: int,
    seed: int,
) -> LlamaForCausalLM:
    """Create a float32 model with tied embeddings, GPT-2's initialisation and heads of size 64."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=kv_heads,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return model


def bfloat16_copy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a copy to publish: bfloat16 weights, and a generation config with the end token."""
    copy = deepcopy(model).bfloat16()
    copy.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return copy


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configuration and tokenizer into a folder, in place of what was there."""
    with whole_folder(folder) as unfinished:
        model.save_pretrained(unfinished, max_shard_size="2GB")
        tokenizer.save_pretrained(unfinished)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Load a saved model."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    assert isinstance(model, LlamaForCausalLM)
    return model
