"""Drafters that know a part of their target's tokens, and yet take and give the target's ids.

Row i of such a model stands for one token of the target, and its last row for all tokens that it can't draft
(training/pruning.py). A file beside the weights says which token each row is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from decoding.errors import ConfigError
from engine.loading.settings import vocabulary_size

FILE = "draft_vocabulary.safetensors"
_TENSOR = "token_ids"


def save_draft_vocabulary(token_ids: Sequence[int], folder: Path) -> None:
    """Write which token of the target each row of a trimmed model stands for. token_ids: [N], in the rows' order."""
    save_file({_TENSOR: torch.tensor(list(token_ids), dtype=torch.int64)}, folder / FILE)


def load_draft_vocabulary(path: str, config: PretrainedConfig, revision: str | None = None) -> Tensor:
    """Return which token of the target each row but the last stands for, [N] int64.

    path: a local folder or a Hub id. config: the checkpoint's.

    Raises ConfigError if the file is missing or broken, or does not fit the model.
    """
    text = config.get_text_config(decoder=True)
    file = cached_file(
        path,
        FILE,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        raise ConfigError(f"its vocabulary is trimmed, but there is no {FILE} in it")
    try:
        token_ids = load_file(file)[_TENSOR]
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{FILE} can't be read: {error}; it needs a tensor {_TENSOR!r}") from error
    size, rows = vocabulary_size(config), int(text.vocab_size)
    if token_ids.dtype != torch.int64 or token_ids.shape != (rows - 1,):
        shape = f"{token_ids.dtype} {list(token_ids.shape)}"
        raise ConfigError(f"{FILE}: {_TENSOR} is {shape}, but a model of {rows} rows needs torch.int64 [{rows - 1}]")
    wrong = token_ids[(token_ids < 0) | (token_ids >= size)]
    if len(wrong):
        raise ConfigError(f"{FILE}: token {int(wrong[0])} is none of the target's {size}")
    if len(token_ids.unique()) < len(token_ids):
        values, counts = token_ids.unique(return_counts=True)
        raise ConfigError(f"{FILE}: token {int(values[counts > 1][0])} is there twice")
    return token_ids


class DraftVocabulary(nn.Module):
    """Translates between the target's ids and a model's rows."""

    tokens: Tensor
    rows: Tensor

    def __init__(self, token_ids: Tensor, size: int) -> None:
        """token_ids: [N] int64, the token of each row but the last. size: V of the target."""
        super().__init__()
        rows = torch.full((size,), len(token_ids), device=token_ids.device)
        rows[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
        self.register_buffer("tokens", token_ids, persistent=False)  # [N]
        self.register_buffer("rows", rows, persistent=False)  # [V]

    def read(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens. Both: int64, of any shape."""
        return self.rows[tokens]

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits for the target's tokens, −∞ for those that the model can't draft.

        logits: [..., N + 1]; returns [..., V].
        """
        every = logits.new_full((*logits.shape[:-1], len(self.rows)), -torch.inf)
        kept = logits[..., :-1]
        return every.scatter_(-1, self.tokens.expand(kept.shape), kept)

    def attach(self, model: PreTrainedModel) -> None:
        """Let the model take and give the target's ids.

        Logits are translated after all that the model does to them: a cap on logits would make −∞ finite.
        """
        model.add_module("draft_vocabulary", self)
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)
        model.config.get_text_config(decoder=True).vocab_size = len(self.rows)

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "input_ids": self.read(kwargs["input_ids"])}

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        output.logits = self.spread(output.logits)
        return output
