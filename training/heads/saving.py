"""Writes trained heads in formats that other servers read too. Must not know how they were trained."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.heads.eagle3 import Eagle3Head
from engine.heads.medusa import MedusaHeads

_WEIGHTS = "model.safetensors"
_LAYER_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
)
_USUAL_DRAFT = 5


def save_eagle3(head: Eagle3Head, layers: Sequence[int], target: str, folder: Path) -> None:
    """Write a head, bfloat16, in the format of speculators. layers: after how many it reads the target's states."""
    layer: Any = head.layers[0]
    layer_config = layer.self_attn.config.to_dict()
    tensors = _half(head)
    size = layer_config["vocab_size"]
    drafted = head.token_ids().cpu()
    tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, drafted, value=True)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _USUAL_DRAFT}],
            "verifier": {"name_or_path": target},
        },
        "transformer_layer_config": {key: layer_config[key] for key in _LAYER_KEYS if key in layer_config},
        "draft_vocab_size": len(head.d2t),
        "target_hidden_size": layer_config["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "norm_before_residual": layer.norm_before_residual,
        "torch_dtype": "bfloat16",
    }
    _write_config(config, folder)


def save_medusa(heads: MedusaHeads, target: str, folder: Path) -> None:
    """Write heads of one layer each, bfloat16, in the format of Medusa's version 2."""
    tensors: dict[str, Tensor] = {}
    for head in range(heads.count):
        tensors[f"{head}.0.linear.weight"] = heads.weight[head, 0].detach().bfloat16().cpu().clone()
        tensors[f"{head}.0.linear.bias"] = heads.bias[head, 0].detach().bfloat16().cpu().clone()
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config = {
        "version": "2",
        "medusa_num_heads": heads.count,
        "medusa_num_layers": 1,
        "hidden_size": heads.weight.shape[-1],
        "base_model_name_or_path": target,
    }
    _write_config(config, folder)


def _half(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's tensors, the floating ones as bfloat16."""
    return {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().cpu().clone()
        for name, tensor in module.state_dict().items()
    }


def _write_config(config: dict[str, object], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
