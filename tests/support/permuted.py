"""The bundled drafter with permuted token ids: the same model in another vocabulary."""

import json
from copy import deepcopy
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def permutation(size: int) -> Tensor:
    """Return the new id of each token, [V] int64."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(5))


def permuted_model(model: PreTrainedModel, order: Tensor) -> PreTrainedModel:
    """Copy a model with permuted input and output embeddings, which may be tied."""
    permuted = deepcopy(model)
    tables = (permuted.get_input_embeddings().weight, permuted.get_output_embeddings().weight)
    with torch.no_grad():
        for weights in {id(table): table for table in tables}.values():
            assert isinstance(weights, Tensor)
            weights[order] = weights.clone()
    return permuted


def permuted_tokenizer(tokenizer: PreTrainedTokenizerBase, order: Tensor) -> PreTrainedTokenizerFast:
    """Copy a tokenizer with permuted ids and the same merges."""
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    data["model"]["vocab"] = {token: int(order[index]) for token, index in data["model"]["vocab"].items()}
    for token in data["added_tokens"]:
        token["id"] = int(order[token["id"]])
    _renumber(data["post_processor"], order)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)), **tokenizer.special_tokens_map
    )


def _renumber(part: Any, order: Tensor) -> None:
    if isinstance(part, dict):
        if "ids" in part:
            part["ids"] = [int(order[index]) for index in part["ids"]]
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            _renumber(inner, order)
