"""Smaller models out of larger ones: fewer decoder layers, or a part of the vocabulary."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.errors import ConfigError
from engine.loading.settings import TARGET_VOCABULARY_KEY, is_trimmed

_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # settings with an entry for each layer
_SHARED_LAYERS = "num_kv_shared_layers"
_SECOND_EMBEDDING = "vocab_size_per_layer_input"
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's decoder layers, in their order. Raises ConfigError if it is not clear which they are."""
    return _layers_and_path(model)[0]


@torch.inference_mode()
def block_influence(model: PreTrainedModel, batches: Iterable[Tensor]) -> list[float]:
    """Return how much each decoder layer changes its input: 1 − the mean cosine of its input and output.

    Block Influence: ShortGPT (arXiv 2403.03853), section 3.2. The least influential layers are dropped first.
    batches: of token ids, int64, [B, T] each, without padding.

    Raises ConfigError if it is not clear which modules are the decoder layers, or there are no tokens.
    """
    layers = decoder_layers(model)
    totals = [0.0] * len(layers)
    tokens = 0

    def add(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        totals[index] += float(cosine_similarity(before.float(), after.float(), dim=-1).double().sum())

    handles = [layer.register_forward_hook(partial(add, i), with_kwargs=True) for i, layer in enumerate(layers)]
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            model(input_ids=batch.to(model.device), use_cache=False, logits_to_keep=1)
            tokens += batch.numel()
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    if not tokens:
        raise ConfigError("the influence of layers needs at least one token of text")
    return [1 - total / tokens for total in totals]


def most_influential(influence: Sequence[float], count: int) -> list[int]:
    """Return the indices of the `count` most influential layers, ascending."""
    if not 1 <= count <= len(influence):
        raise ConfigError(f"{count} layers can't be kept of {len(influence)}: keep 1 to {len(influence)}")
    return sorted(sorted(range(len(influence)), key=lambda index: -influence[index])[:count])


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Drop all decoder layers but those of these ascending indices, in place, and return the model.

    Raises ConfigError if an index is wrong, or the configuration can't describe the smaller model.
    """
    layers, path = _layers_and_path(model)
    config = model.config.get_text_config(decoder=True)
    if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= len(layers):
        raise ConfigError(f"layers {list(kept)} can't be kept: give ascending indices of 0 to {len(layers) - 1}")
    if getattr(config, _SHARED_LAYERS, 0):
        raise ConfigError(f"{type(model).__name__} shares keys and values between layers, so none can be dropped")
    for name in _BY_LAYER:
        values = getattr(config, name, None)
        if values is not None and len(values) == len(layers):
            setattr(config, name, [values[index] for index in kept])
    config.num_hidden_layers = len(kept)
    smaller = nn.ModuleList(layers[index] for index in kept)
    for index, layer in enumerate(smaller):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, "layer_idx", index)  # noqa: B010  # mypy takes attributes of modules for tensors
    model.set_submodule(path, smaller)
    _check_described(model)
    return model


def trim_vocabulary(model: PreTrainedModel, token_ids: Sequence[int]) -> PreTrainedModel:
    """Drop the other tokens' rows of the embedding and of the output layer, in place, and return the model.

    Row i is then for token `token_ids[i]`. One more row, the last, is for all other tokens: it starts as the mean of
    theirs. `save_draft_vocabulary` stores the ids beside the model. FR-Spec (arXiv 2502.14856) and VocabTrim
    (arXiv 2506.22694) trim drafters like this.

    Raises ConfigError if ids are missing, repeated or out of range, or the model has more than these two layers per
    token.
    """
    config = model.config.get_text_config(decoder=True)
    if is_trimmed(config):
        raise ConfigError(f"{type(model).__name__} has a trimmed vocabulary already")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(config, _SECOND_EMBEDDING, None) or not isinstance(embedding, nn.Embedding) or head is None:
        raise ConfigError(f"{type(model).__name__} can't have a part of its vocabulary: its embeddings are not plain")
    size = embedding.num_embeddings
    _check_ids(token_ids, size)
    ids = torch.tensor(list(token_ids), device=embedding.weight.device)
    layers = [embedding] if head.weight is embedding.weight else [embedding, head]
    weights = [_kept_and_mean(layer.weight, ids) for layer in layers]
    bias = getattr(head, "bias", None)
    biases = None if bias is None else _kept_and_mean(bias, ids)
    model.resize_token_embeddings(len(token_ids) + 1, mean_resizing=False)
    layers = [model.get_input_embeddings(), model.get_output_embeddings()][: len(layers)]
    with torch.no_grad():
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.copy_(weight)
        if biases is not None:
            model.get_output_embeddings().bias.copy_(biases)
    setattr(config, TARGET_VOCABULARY_KEY, size)
    _rename_special_tokens(model, {token: row for row, token in enumerate(token_ids)})
    return model


def _layers_and_path(model: PreTrainedModel) -> tuple[nn.ModuleList, str]:
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (module, path)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and path.count(".") <= 2
    ]
    if len(lists) != 1:
        raise ConfigError(f"{type(model).__name__} has {len(lists)} lists of {count} layers; one was expected")
    return lists[0]


def _check_described(model: PreTrainedModel) -> None:
    """Raise ConfigError if the configuration describes other weights than the model has."""
    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(deepcopy(model.config))
    shapes = [{name: weight.shape for name, weight in each.state_dict().items()} for each in (model, described)]
    if shapes[0] != shapes[1]:
        name = min(shapes[0].items() ^ shapes[1].items())[0]
        raise ConfigError(
            f"{type(model).__name__} has layers of different kinds, and its configuration can't describe these: {name}"
        )


def _check_ids(token_ids: Sequence[int], size: int) -> None:
    if not token_ids:
        raise ConfigError("a trimmed vocabulary needs at least one token")
    if len(set(token_ids)) < len(token_ids):
        raise ConfigError("a trimmed vocabulary can't have a token twice")
    for token in token_ids:
        if not 0 <= token < size:
            raise ConfigError(f"token {token} can't be kept: the model has tokens 0 to {size - 1}")


def _kept_and_mean(rows: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of these ids and the mean of the others; of all, if there are no others. rows: [V, …]."""
    rows = rows.detach()
    dropped = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    dropped[ids] = False
    others = rows[dropped] if bool(dropped.any()) else rows
    return torch.cat([rows[ids], others.float().mean(dim=0, keepdim=True).to(rows.dtype)])


def _rename_special_tokens(model: PreTrainedModel, rows: dict[int, int]) -> None:
    """Let the configurations name special tokens by their rows; those that were dropped have none."""
    config = model.config.get_text_config(decoder=True)
    given: list[Any] = [config, model.config, model.generation_config]
    holders = {id(holder): holder for holder in given if holder is not None}
    for holder, name in product(holders.values(), _SPECIAL_TOKENS):
        setattr(holder, name, _renamed(getattr(holder, name, None), rows))
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = config.pad_token_id if isinstance(config.pad_token_id, int) else None


def _renamed(ids: int | list[int] | None, rows: dict[int, int]) -> int | list[int] | None:
    if isinstance(ids, list):
        return [rows[token] for token in ids if token in rows] or None
    return None if ids is None else rows.get(ids)
