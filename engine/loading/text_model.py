"""The text model inside a multimodal checkpoint: its configuration, its class, and the names of its weights.

Only its weights are read, so the other towers take no memory.
"""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_PRETRAINING_MAPPING,
    MODEL_MAPPING,
)

from decoding.errors import ConfigError

# How to rename a text model's weights from their names in multimodal checkpoints to those in a causal model.
RENAMED = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
# Text models without a causal class in transformers. All get their logits from an output layer and nothing else.
_PLAIN_OUTPUT = {
    f"{kind}_text" for kind in ("glm4v", "glm4v_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
}
_CAUSAL = "ForCausalLM"  # ends the names of classes
_INHERITED = ("dtype", "quantization_config")  # settings of the whole checkpoint


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the checkpoint's text model, which is `config` itself if there are no other parts."""
    text: PretrainedConfig = config.get_text_config(decoder=True)
    if text is config or config.is_encoder_decoder:
        return config
    # The class of the whole checkpoint looks for this setting in the outer configuration, so that one decides.
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False)))
    for name in _INHERITED:
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return text


def other_parts(config: PretrainedConfig) -> list[str]:
    """Return what a multimodal checkpoint has besides its text model, such as "vision"."""
    if config.get_text_config(decoder=True) is config:
        return []
    parts = (name.removesuffix("_config") for name in config.sub_configs if getattr(config, name, None) is not None)
    return sorted(set(parts) - {"text"})


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that computes the logits of a text model. config: a text model's.

    Raises ConfigError if there is no such class.
    """
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_PRETRAINING_MAPPING):  # Mistral 4 is in the second alone
        if type(config) in mapping:
            causal: type[PreTrainedModel] = _get_model_class(config, mapping)
            if mapping is MODEL_FOR_CAUSAL_LM_MAPPING or causal.__name__.endswith(_CAUSAL):
                return causal
    if config.model_type not in _PLAIN_OUTPUT:
        raise ConfigError(f"transformers has no causal language model for configurations of type {config.model_type!r}")
    base = _get_model_class(config, MODEL_MAPPING)
    family = next(kind for kind in base.__mro__ if kind.__bases__ == (PreTrainedModel,))  # with its flags
    name = base.__name__.replace("TextModel", "TextForCausalLM")
    stored = get_checkpoint_conversion_mapping(config.model_type.removesuffix("_text"))
    if stored is not None:  # experts are stored one by one
        register_checkpoint_conversion_mapping(name, stored, overwrite=True)
    members = {
        "config_class": type(config),
        "text_class": base,
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        "_tp_plan": {"lm_head": "colwise_gather_output"},
        "__module__": base.__module__,
    }
    return type(name, (_PlainOutput, family), members)


class _PlainOutput(PreTrainedModel, GenerationMixin):
    """A text model with an output layer."""

    text_class: type[PreTrainedModel]
    base_model_prefix = "model"

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = self.text_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self, *, logits_to_keep: int | Tensor = 0, labels: None = None, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Return logits [B, ·, V]. logits_to_keep: after which tokens, by index, or how many of the last; 0: all."""
        output = self.model(**inputs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)
