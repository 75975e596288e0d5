"""Weights that are rounded while they are loaded: which layers, and how much memory they take. Rounded activations."""

import torch
from torch import nn
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import GROUP, Quantization
from engine.layers.faster_layers import round_inputs
from engine.layers.quantized_linear import computes_integers
from engine.loading.quantizer import IntegerConfig, rounded_layers, rounded_weights

_NO_INTEGERS = (
    "models.{}.activations: int8 needs weights that are integers; add quantization: int8 or int4, or leave it out"
)


def quantization_config(kind: Quantization, skeleton: PreTrainedModel) -> IntegerConfig:
    """Return the configuration for transformers. skeleton: the model on the meta device.

    Raises ConfigError if no layer of the model can be rounded.
    """
    if all(isinstance(layer, nn.Embedding) for _, layer, _ in rounded_layers(skeleton, kind)):
        raise ConfigError(
            f"{kind} needs linear layers whose inputs are a multiple of {GROUP}; {type(skeleton).__name__} has none"
        )
    return IntegerConfig(kind)


def weight_bytes(skeleton: PreTrainedModel, dtype: torch.dtype, kind: Quantization | None) -> int:
    """Return how many bytes the weights will take."""
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    sizes = {id(parameter): parameter.numel() * dtype.itemsize for parameter in parameters.values()}
    weights = {} if kind is None else rounded_weights(skeleton, kind)
    for name, weight in weights.items():
        parameter = parameters[name if name in parameters else f"{name}.weight"]
        sizes[id(parameter)] = sum(part.nbytes for part in weight.parts().values())
    return sum(sizes.values())


def check_activations(name: str, device: torch.device, kind: Quantization | None, *, stored: bool) -> None:
    """Raise ConfigError if activations should be rounded, but no products of integers are computed.

    name: of the model in errors. stored: its layers are integers without `kind`.
    """
    if device.type != "cpu" or not computes_integers(device):
        raise ConfigError(
            f"models.{name}.activations: int8 needs a CPU with a C++ compiler (g++ or clang++), and the model runs on "
            f"{device.type}; set device: cpu, install a compiler, or leave it out"
        )
    if kind == "nf4" or (kind is None and not stored):
        raise ConfigError(_NO_INTEGERS.format(name))


def round_activations(name: str, model: PreTrainedModel) -> None:
    """Let layers of integers round their inputs to 8 bits. name: of the model in errors.

    Raises ConfigError if there are no such layers.
    """
    if not round_inputs(model):
        raise ConfigError(_NO_INTEGERS.format(name))
