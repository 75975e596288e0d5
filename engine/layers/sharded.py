"""A rank's part of a model that a tensor-parallel group computes, split by transformers' plan for the architecture.

transformers reads each rank's part of the weights. Here the parts become plain layers, which our kernels compute, and
the exchange around them is ours: sums are made in the order of the ranks, so they don't depend on the batch.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import QuantizedWeight
from engine.layers.latent import latent_layers
from engine.layers.quantized_experts import expert_matrices, part_name
from engine.layers.quantized_linear import QuantizedModule

_REPLICATED = "replicated_with_grad_allreduce"
_GATHERED = {"colwise_gather_output", "colwise_rep"}  # each rank gets the results of all
_SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}  # each rank has the inputs of all
_LAYERS: Mapping[str, type[nn.Module]] = {  # that a style may be of
    **dict.fromkeys(("colwise", "rowwise", *_GATHERED, *_SPLIT_INPUT), nn.Linear),
    "embedding_rowwise": nn.Embedding,
    _REPLICATED: nn.Module,
}

_EXPERTS = "moe_tp_experts"
_MATRICES = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}  # of experts

# Takes a layer's forward and its input; returns what the layers of all ranks make of theirs together.
Exchange = Callable[..., Tensor]


def can_take_parts(skeleton: PreTrainedModel) -> bool:
    """Whether the plan splits linear layers, embeddings and plain experts alone. skeleton: on the meta device."""
    plan = skeleton.tp_plan
    layers = {_starred(name): module for name, module in skeleton.named_modules()}
    experts = {f"{name}.{matrix}": style for name in layers for matrix, style in _MATRICES.items() if name in plan}
    for name in {_starred(name) for name, _ in skeleton.named_parameters()} & plan.keys():
        if plan[name] != experts.get(name):
            return False
    fitting = (_fits(layer, plan[name]) for name, layer in layers.items() if name in plan)
    return all(fitting) and next(latent_layers(skeleton), None) is None


def _fits(layer: Any, style: str) -> bool:
    if style == _EXPERTS:
        return expert_matrices(layer) == (*_MATRICES,) and not layer.is_transposed and not layer.has_bias
    return isinstance(layer, _LAYERS.get(style, ()))


def plan_parts(model: PreTrainedModel, weights: Mapping[str, QuantizedWeight]) -> None:
    """Plan how quantised weights are split: where their layers are, and between groups. One rank splits nothing.

    weights: by the names of layers and of matrices of experts, on the meta device.

    Raises ConfigError if the ranks can't share a layer's groups evenly.
    """
    settings = getattr(model.config, "distributed_config", None)
    ranks = 1 if settings is None else settings.tp_size
    if ranks == 1:
        return
    plan, embedding = model.tp_plan, model.get_input_embeddings()
    layers = dict(model.named_modules())
    for name, weight in weights.items():
        starred, layer = _starred(name), layers.get(name)  # None: a matrix of experts
        style = plan.get(starred, "")
        takes_part = style.startswith("rowwise")
        if takes_part:
            _check_groups(name, weight, ranks)
        for part in weight.parts():
            full = part_name(starred, part) if layer is None else f"{starred}.{part}"
            if part == "table" or (part == "order" and not takes_part):
                plan[full] = _REPLICATED
            elif layer is embedding:
                plan[full] = "colwise"
            elif layer is None and style:
                plan[full] = style


def _check_groups(name: str, weight: QuantizedWeight, ranks: int) -> None:
    groups = weight.scales.shape[-1]
    if groups % ranks:
        fitting = max(count for count in range(1, ranks) if groups % count == 0)
        raise ConfigError(
            f"{name} has {groups} groups of {weight.group} inputs, which {ranks} devices can't share evenly; set "
            f"tensor_parallel to {fitting}, or use the original model, which is not quantised"
        )


@torch.no_grad()
def keep_parts(model: nn.Module) -> None:
    """Replace the parameters that transformers split, which are DTensors, by this rank's parts of them."""
    split = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if hasattr(parameter, "_local_tensor")
    ]
    parts: dict[int, nn.Parameter] = {}
    for module, name, parameter in split:
        if id(parameter) not in parts:  # tied layers share one
            part = parameter._local_tensor
            is_view = part.nbytes < part.untyped_storage().nbytes()  # which keeps the whole tensor in memory
            parts[id(parameter)] = nn.Parameter(part.clone() if is_view else part, requires_grad=False)
        setattr(module, name, parts[id(parameter)])


def take_parts(model: PreTrainedModel) -> Mapping[str, Exchange]:
    """Make plain layers of this rank's parts, and return what completes their results, by name.

    Pass that to `exchange_results` once the layers have got their kernels.
    """
    keep_parts(model)
    exchanges: dict[str, Exchange] = {}
    for name, module in model.named_modules():
        style = model.tp_plan.get(_starred(name), "")
        if style:
            vars(module).pop("forward", None)  # transformers' own exchange
        if style == _EXPERTS and (model.tp_size or 1) > 1:
            exchanges[name] = _add
        elif isinstance(module, nn.Linear | nn.Embedding | QuantizedModule):
            exchange = _exchange(module, style)
            exchanges |= {} if exchange is None else {name: exchange}
    return exchanges


def exchange_results(model: nn.Module, exchanges: Mapping[str, Exchange]) -> None:
    """Let the layers of a model give the results of all ranks. exchanges: of `take_parts`."""
    for name, exchange in exchanges.items():
        layer: Any = model.get_submodule(name)
        layer.forward = partial(exchange, layer.forward)


def _exchange(layer: Any, style: str) -> Exchange | None:
    """Tell a layer the size of its part; return what completes its results, if anything does."""
    is_quantized, is_linear = isinstance(layer, QuantizedModule), isinstance(layer, nn.Linear)
    rows, columns = layer.quantized.shape if is_quantized else layer.weight.shape
    if not is_linear:
        size, layer.num_embeddings = layer.num_embeddings, rows
        return partial(_look_up, rows=rows, size=size) if rows < size else None
    outputs, layer.out_features = layer.out_features, rows
    inputs, layer.in_features = layer.in_features, columns
    if columns < inputs:
        bias, layer.bias = layer.bias, None
        order = layer.order if is_quantized else None
        if is_quantized:
            layer.order = None
        return partial(_sum, size=inputs, bias=bias, order=order, takes_all=style in _SPLIT_INPUT)
    return partial(_gather, size=outputs) if rows < outputs and style in _GATHERED else None


def _look_up(forward: Exchange, ids: Tensor, *, rows: int, size: int) -> Tensor:
    """ids: [...]; returns [..., H]. rows: of this rank's part of the embedding, of `size`."""
    own = ids - dist.get_rank() * _width(size)
    missing = (own < 0) | (own >= rows)
    result = forward(own.masked_fill(missing, 0)).masked_fill(missing[..., None], 0)
    dist.all_reduce(result)  # one rank has it, so that the order doesn't matter
    return result


def _gather(forward: Exchange, x: Tensor, *, size: int) -> Tensor:
    """x: [..., in]; returns [..., size]."""
    return _whole(forward(x), size)


def _sum(
    forward: Exchange, x: Tensor, *, size: int, bias: Tensor | None, order: Tensor | None, takes_all: bool
) -> Tensor:
    """Return [..., out], and add what every rank leaves out. x: [..., in], of all ranks or of this one.

    size: inputs of all ranks. order: which of these the columns are for; None: this rank's. takes_all: x has all.
    """
    if order is not None:
        x = (x if takes_all else _whole(x, size)).index_select(-1, order)
    elif takes_all:
        x = x.split(_width(size), dim=-1)[dist.get_rank()]
    return _total(forward(x), bias)


def _add(forward: Exchange, *inputs: Tensor, **options: Tensor) -> Tensor:
    return _total(forward(*inputs, **options))


def _total(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what all ranks have together, added in their order."""
    first, *others = _of_all_ranks(x)
    total = first.float() if bias is None else first.float() + bias
    for other in others:
        total = total + other
    return total.to(first.dtype)


def _whole(x: Tensor, size: int) -> Tensor:
    """Return the features of all ranks, [..., size]. x: this one's; the last ranks may have fewer."""
    padded = pad(x, (0, _width(size) - x.shape[-1]))
    return torch.cat(_of_all_ranks(padded), dim=-1)[..., :size]


def _of_all_ranks(x: Tensor) -> list[Tensor]:
    x = x.contiguous()
    tensors = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, x)
    return tensors


def _starred(name: str) -> str:
    """Return a name as plans have it, with stars for the numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _width(size: int) -> int:
    """Return how much of a dimension all ranks but the last ones have."""
    return -(-size // dist.get_world_size())
