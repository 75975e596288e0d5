"""Llama models of well-known sizes whose weights take no memory."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.layers.faster_layers import use_faster_layers

# hidden, layers, heads, kv heads, intermediate, tied output layer
_SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "8b": (4096, 32, 32, 8, 14336, False),  # Llama 3
    "1b": (2048, 16, 32, 8, 8192, True),  # Llama 3.2
    "135m": (576, 30, 9, 3, 1536, True),  # SmolLM2
    "tiny": (64, 2, 4, 2, 128, False),
}
SHAPES = tuple(_SIZES)


def llama_config(shape: str, vocab_size: int, layers: int | None = None) -> LlamaConfig:
    """Return the configuration of a shape. layers: their number, if it is not the shape's."""
    hidden, usual_layers, heads, kv_heads, intermediate, tied = _SIZES[shape]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers or usual_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )


def meta_model(shape: str, vocab_size: int, layers: int | None = None) -> PreTrainedModel:
    """Return a model in bfloat16 on the `meta` device, with the modules that a server gives it.

    layers: their number, if it is not the shape's.
    """
    with torch.device("meta"):
        model: PreTrainedModel = LlamaForCausalLM(llama_config(shape, vocab_size, layers))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    use_faster_layers(model)
    return model
