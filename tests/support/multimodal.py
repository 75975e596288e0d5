"""Tiny multimodal checkpoints with random weights, in the form that the Hub has them in."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, Gemma3nForCausalLM, PreTrainedModel

from tests.support.hybrids import DELTA_RULE, SHAPE, VOCAB

_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_PIXTRAL = _VISION | {"model_type": "pixtral", "head_dim": 8}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
_DEEP_VISION = _QWEN_VISION | {"deepstack_visual_indexes": [0]}
_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


def _axes(*sections: int, **more: object) -> dict[str, Any]:
    """Return rotary positions on three axes, of half a head together."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}}


_GLM_EXPERTS = _EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LLAMA_4 = {"intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2}
_LLAMA_4_VISION = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
# By name: the type of the whole, the text model's settings, the vision tower's.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", _WINDOWS, _VISION),
    "gemma3n": ("gemma3n", _WINDOWS | _PER_LAYER | {"laurel_rank": 4, "num_kv_shared_layers": 2}, {}),
    "gemma4": ("gemma4", _WINDOWS | _PER_LAYER | {"num_kv_shared_layers": 2, "global_head_dim": 16}, _VISION),
    "mistral3": ("mistral3", {"model_type": "mistral"}, _PIXTRAL),
    "ministral3": ("mistral3", {"model_type": "ministral3", "rope_parameters": _YARN}, _PIXTRAL),
    "qwen2_5_vl": ("qwen2_5_vl", _axes(1, 1, 2), _QWEN_VISION),
    "qwen3_vl": ("qwen3_vl", _axes(2, 1, 1, mrope_interleaved=True), _DEEP_VISION),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        _EXPERTS | {"num_experts": 4} | _axes(2, 1, 1, mrope_interleaved=True),
        _DEEP_VISION,
    ),
    "glm4v_moe": ("glm4v_moe", _GLM_EXPERTS | _axes(1, 1, 2, partial_rotary_factor=1.0), _QWEN_VISION),
    "qwen3_5": ("qwen3_5", DELTA_RULE, _QWEN_VISION),
    "llama4": ("llama4", _LLAMA_4, _VISION | _LLAMA_4_VISION),
    "llava": ("llava", {"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
    "smolvlm": ("smolvlm", {"model_type": "llama"}, _VISION),
}


def make_multimodal(name: str, folder: Path) -> PreTrainedModel:
    """Save a checkpoint. Return the class that it names; the text model of Gemma 3n, whose tower needs a package."""
    kind, text, vision = FAMILIES[name]
    parts: dict[str, Any] = {"text_config": SHAPE | text} | ({"vision_config": vision} if vision else {})
    config = CONFIG_MAPPING[kind](**parts)
    torch.manual_seed(0)
    if name == "gemma3n":
        text_model: Any = Gemma3nForCausalLM
        model: PreTrainedModel = text_model(config.get_text_config())
    else:
        model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model = model.float().eval()
    model.save_pretrained(folder)  # it writes the names of weights that the Hub has
    if name == "gemma3n":
        file = folder / "model.safetensors"
        weights = {key.replace("model.", "model.language_model.", 1): part for key, part in load_file(file).items()}
        weights["model.vision_tower.stem.weight"] = torch.ones(4, 4)
        save_file(weights, file, {"format": "pt"})
        config.save_pretrained(folder)
    return model


def flatten(folder: Path) -> None:
    """Write the text model's settings beside the others, as the Hub's Qwen2.5-VL has them."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = {key: value for key, value in config.pop("text_config").items() if key != "model_type"}
    file.write_text(json.dumps(text | config))
