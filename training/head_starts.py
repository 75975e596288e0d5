"""What heads of layers start from, of their target, and how they are optimised."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from engine.heads.dflash import DFlashHead
from engine.heads.eagle3 import Eagle3Head

BETAS, DECAY = (0.9, 0.95), 0.01
_OTHER_RATE = 0.15  # of AdamW, in parts of the learning rate, which is Muon's
_HEAD_DIM = 64
_STD = 0.02
Head = TypeVar("Head", bound=nn.Module)


class WithEmbedding(nn.Module, Generic[Head]):
    """A head with its target's embedding."""

    embedding: Tensor  # [V, H]

    def __init__(self, head: Head, embedding: Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("embedding", embedding, persistent=False)


def muon_and_adamw(head: nn.Module, learning_rate: float) -> list[Optimizer]:
    """Return Muon for matrices inside a head, and AdamW for the rest: output layer, norms."""
    inside: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in head.named_parameters():
        (inside if parameter.ndim == 2 and not name.startswith("lm_head") else others).append(parameter)
    other_rate = _OTHER_RATE * learning_rate
    return [
        Muon(inside, lr=learning_rate, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=other_rate, betas=BETAS, weight_decay=DECAY, fused=True),
    ]


def layer_settings(target: PreTrainedModel, layers: int) -> dict[str, Any]:
    """Return the configuration of layers of the target's size, without grouped keys and values."""
    config = target.config.get_text_config(decoder=True)
    size: int = config.hidden_size
    head_dim = _HEAD_DIM if size % _HEAD_DIM == 0 else size // config.num_attention_heads
    rope: dict[str, object] = getattr(config, "rope_parameters", None) or {}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": size // head_dim,
        "num_key_value_heads": size // head_dim,  # EAGLE-3: the next token's embedding has to pass through the values
        "head_dim": head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
    }


@torch.no_grad()
def start_from(head: Eagle3Head | DFlashHead, target: PreTrainedModel, token_ids: Sequence[int], *, seed: int) -> None:
    """Draw a head's matrices, but copy from the target what has the same size there.

    That is the MLPs of its last layers with their norms, its final norm, and the rows of its output layer.
    token_ids: that the head can draft, ascending.
    """
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = target.state_dict()
    prefix = next(name for name in state if ".layers." in name).partition(".layers.")[0]
    before = target.config.get_text_config(decoder=True).num_hidden_layers - len(head.layers)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, _STD, generator=generator)
        kind, _, rest = name.partition(".")
        if kind == "norm" or ".mlp." in name or ".post_attention_layernorm." in name:
            index, _, part = rest.partition(".")
            of_target = name if kind == "norm" else f"layers.{int(index) + before}.{part}"
            source = state.get(f"{prefix}.{of_target}")
            if source is not None and source.shape == parameter.shape:
                parameter.copy_(source)
    ids = torch.tensor(token_ids)
    output_layer: Any = target.get_output_embeddings()
    assert head.lm_head is not None
    head.lm_head.weight.copy_(output_layer.weight[ids])
    head.d2t.copy_(ids - torch.arange(len(ids)))
