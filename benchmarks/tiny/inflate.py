"""Function-preserving growth of a Llama checkpoint: the same text at a higher cost, to measure speed at scale.

The residual stream is zero in every added dimension: the embedding and all output
projections (`o_proj`, `down_proj`) write nothing there. RMSNorm takes its mean over more dimensions; scaled weights and
epsilon undo that exactly. Added heads and feed-forward columns compute, but have zero output columns.
Added layers write values of `ADDED_LAYER_SCALE` times the usual size.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

MULTIPLE = 64
ADDED_LAYER_SCALE = 1e-4


@torch.no_grad()
def inflate(model: LlamaForCausalLM, *, hidden: int, layers: int, intermediate: int, seed: int = 0) -> LlamaForCausalLM:
    """Return a larger model with the same logits, up to rounding and the added layers, in the model's dtype.

    The head size and the number of query heads per key-value head stay; `hidden` is filled with as many heads as fit.

    Raises:
        ValueError: a size is smaller than the model's, or `hidden` or `intermediate` is not a multiple of 64.
    """
    config = _grown_config(model.config, hidden=hidden, layers=layers, intermediate=intermediate)
    with torch.device("meta"):
        grown = LlamaForCausalLM(config)
    nn.Module.to(grown, dtype=model.dtype)
    nn.Module.to_empty(grown, device=model.device)
    grown.model.rotary_emb = LlamaRotaryEmbedding(config).to(model.device)
    grown.tie_weights()
    norm_scale = (model.config.hidden_size / hidden) ** 0.5
    source = model.get_parameter
    generator = torch.Generator(model.device).manual_seed(seed)
    _copy_into(grown.model.embed_tokens.weight.zero_(), source("model.embed_tokens.weight"))
    _copy_into(grown.model.norm.weight.fill_(norm_scale), source("model.norm.weight") * norm_scale)
    if not config.tie_word_embeddings:
        _copy_into(grown.lm_head.weight.zero_(), source("lm_head.weight"))
    for index, layer in enumerate(grown.model.layers):
        _randomize(layer, norm_scale, config.initializer_range, generator)
        if index < model.config.num_hidden_layers:
            for name, parameter in model.model.layers[index].named_parameters():
                scaled = parameter * norm_scale if parameter.ndim == 1 else parameter
                _copy_into(layer.get_parameter(name), scaled)
        else:
            _scale_down(layer, model.config, generator)
    grown.eval()
    grown.generation_config = deepcopy(model.generation_config)
    return grown


def _grown_config(source: LlamaConfig, *, hidden: int, layers: int, intermediate: int) -> LlamaConfig:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    for name, size in sizes.items():
        if size < getattr(source, name):
            raise ValueError(f"{name} {size} is smaller than the source's {getattr(source, name)}")
        if name != "num_hidden_layers" and size % MULTIPLE:
            raise ValueError(f"{name} {size} is not a multiple of {MULTIPLE}")
    if source.attention_bias or source.mlp_bias:
        raise ValueError("a source with attention_bias or mlp_bias cannot be inflated; expected neither")
    assert source.num_key_value_heads is not None
    assert source.head_dim is not None
    group = source.num_attention_heads // source.num_key_value_heads
    kv_heads = hidden // source.head_dim // group
    config = deepcopy(source)
    config.update(
        {
            **sizes,
            "num_attention_heads": kv_heads * group,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": source.rms_norm_eps * source.hidden_size / hidden,
        }
    )
    return config


def _randomize(layer: LlamaDecoderLayer, norm_scale: float, std: float, generator: torch.Generator) -> None:
    """Let input projections be random and of the usual size, and output projections zero."""
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(norm_scale)
        elif _is_output(name):
            parameter.zero_()
        else:
            parameter.normal_(std=std, generator=generator)


def _scale_down(layer: LlamaDecoderLayer, source: LlamaConfig, generator: torch.Generator) -> None:
    """Let an added layer write small values, into the source's dimensions only."""
    for name, parameter in layer.named_parameters():
        if _is_output(name):
            std = ADDED_LAYER_SCALE * source.initializer_range
            parameter[: source.hidden_size].normal_(std=std, generator=generator)


def _is_output(name: str) -> bool:
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def _copy_into(larger: Tensor, smaller: Tensor) -> None:
    """Copy into the lowest indices of every dimension."""
    larger[tuple(map(slice, smaller.shape))] = smaller
