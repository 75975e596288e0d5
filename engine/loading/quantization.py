"""Weights that are quantised while they are loaded: which layers, in which format, how much memory they take.

NF4 with double quantisation is bitsandbytes': Dettmers et al., arXiv 2305.14314, section 3.
"""

import logging
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import GROUP
from engine.layers.faster_layers import round_inputs
from engine.layers.latent import PROJECTION, latent_layers
from engine.layers.quantized_linear import computes_integers
from engine.loading.quantizer import IntegerConfig, rounded_experts, rounded_layers

Quantization = Literal["int4", "int8", "nf4"]

_BLOCK = 64  # weights that share a scale in NF4
_NF4_BYTES = 0.5 + 2 / _BLOCK  # per weight
_NO_INTEGERS = (
    "models.{}.activations: int8 needs weights that are integers; add quantization: int8 or int4, or leave it out"
)
_BITS: dict[Quantization, int] = {"int4": 4, "int8": 8}
_log = logging.getLogger(__name__)


def quantization_config(kind: Quantization, skeleton: PreTrainedModel, device: torch.device) -> QuantizationConfigMixin:
    """Return the configuration for transformers. skeleton: the model on the meta device.

    Raises:
        ConfigError: no layer of the model can be quantised on that device, or bitsandbytes is not installed.
    """
    if kind in _BITS:
        if not any(isinstance(layer, nn.Linear) for _, layer, _ in rounded_layers(skeleton, _BITS[kind])):
            raise ConfigError(
                f"{kind} needs linear layers whose inputs are a multiple of {GROUP}; {type(skeleton).__name__} has none"
            )
        return IntegerConfig(_BITS[kind])
    if find_spec("bitsandbytes") is None:
        raise ConfigError("nf4 needs bitsandbytes: pip install 'consort[quantization]'; int4 does not")
    layers = _nf4_weights(skeleton, device)
    if not layers:
        fitting = f" with dimensions that are multiples of {_BLOCK}" if device.type == "cpu" else ""
        raise ConfigError(f"nf4 needs linear layers{fitting}, and {type(skeleton).__name__} has none")
    skipped = [*get_keys_to_not_convert(skeleton), *(set(_linear_weights(skeleton)) - set(layers)), PROJECTION]
    # bitsandbytes warns on every call about casts, and on import about an optional kernel
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=skipped,
    )


def _nf4_weights(skeleton: PreTrainedModel, device: torch.device) -> dict[str, Tensor]:
    """Return the weights to quantise, by layer name. Kernels on CPUs need full blocks in both dimensions."""
    return {
        name: weight
        for name, weight in _linear_weights(skeleton).items()
        if device.type != "cpu" or all(size % _BLOCK == 0 for size in weight.shape)
    }


def weight_bytes(skeleton: PreTrainedModel, dtype: torch.dtype, kind: Quantization | None, device: torch.device) -> int:
    """Return how many bytes the weights will take."""
    sizes: dict[int, float] = {id(parameter): parameter.numel() * dtype.itemsize for parameter in skeleton.parameters()}
    if kind == "nf4":
        sizes |= {id(weight): weight.numel() * _NF4_BYTES for weight in _nf4_weights(skeleton, device).values()}
    elif kind is not None:
        layers = rounded_layers(skeleton, _BITS[kind])
        weights = {layer.weight: bits for _, layer, bits in layers}
        weights |= dict.fromkeys(map(skeleton.get_parameter, rounded_experts(skeleton)), _BITS[kind])
        sizes |= {id(weight): weight.numel() * (bits / 8 + 2 / GROUP) for weight, bits in weights.items()}
    return int(sum(sizes.values()))


def warn_of_outliers(name: str, path: str, config: PretrainedConfig) -> None:
    """Say so if a checkpoint chooses columns for 16 bits over all tokens of a call, as LLM.int8 does by default."""
    stored = getattr(config, "quantization_config", None) or {}
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    if settings.get("load_in_8bit") and settings.get("llm_int8_threshold", 6.0) > 0:
        _log.warning(
            "models.%s.path: %s was saved as LLM.int8 with outlier columns (llm_int8_threshold above 0), so a text "
            "depends on what else is in its batch, and on drafts; save it with llm_int8_threshold 0, or quantise the "
            "original by `quantization: int8`",
            *(name, path),
        )


@torch.no_grad()
def restore_latent_projections(model: PreTrainedModel) -> None:
    """Replace quantised projections of latents by plain layers of the same weights."""
    for module in latent_layers(model):
        projection = module.kv_b_proj
        if type(projection) is not nn.Linear:
            eye = torch.eye(module.kv_lora_rank, dtype=model.dtype, device=module.kv_b_proj.weight.device)
            weight = projection(eye).T.contiguous()
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            plain.weight = nn.Parameter(weight, requires_grad=False)
            module.kv_b_proj = plain


def check_activations(name: str, device: torch.device, kind: Quantization | None, *, stored: bool) -> None:
    """Raise ConfigError if activations should be rounded, but no products of integers are computed.

    name: of the model in errors. stored: its layers are integers without `kind`.
    """
    if device.type != "cpu" or not computes_integers(device):
        raise ConfigError(
            f"models.{name}.activations: int8 needs a CPU with a C++ compiler (g++ or clang++), and the model runs on "
            f"{device.type}; set device: cpu, install a compiler, or leave it out"
        )
    if kind not in _BITS and (kind == "nf4" or not stored):
        raise ConfigError(_NO_INTEGERS.format(name))


def round_activations(name: str, model: PreTrainedModel) -> None:
    """Let layers of integers round their inputs to 8 bits. name: of the model in errors.

    Raises:
        ConfigError: there are no such layers.
    """
    if not round_inputs(model):
        raise ConfigError(_NO_INTEGERS.format(name))


def read_contiguous_inputs(model: PreTrainedModel) -> None:
    """Copy transposed inputs of 4-bit layers of bitsandbytes, whose function for CPUs takes them for contiguous."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.register_forward_pre_hook(lambda _, given: (given[0].contiguous(), *given[1:]))


def _linear_weights(skeleton: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights that transformers would quantise, by layer name: linear layers but the one for logits."""
    kept = get_keys_to_not_convert(skeleton)
    return {
        name: module.weight
        for name, module in skeleton.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, kept)
        and not name.endswith(f".{PROJECTION}")
    }
