"""The target's hidden states along its own texts, in files: a shard of features for each shard of texts.

The target is larger than its heads: to run it anew in every epoch would take most of a training's time.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from training.files import write_whole
from training.texts import Chat, read_shard, shard_files

_NAME = "features"


def write_features(runner: Runner, texts: Path, folder: Path, *, longest: int) -> Generator[int, None, None]:
    """Write the features of the texts' shards that have none yet. Yields the shards that are done, after each.

    Args:
        runner: keeps the hidden states to write, and has a row of cache for each text that is run at once.
        longest: tokens of a text, with its prompt; what is beyond is cut off.

    Raises:
        ConfigError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(shard_files(texts), start=1):
        file = folder / f"{shard.stem}.safetensors"
        if not file.exists():
            write_whole(file, save({_NAME: _run(runner, read_shard(shard), longest)}))
            yield number


@dataclass(frozen=True, slots=True, eq=False)
class StoredFeatures:
    """The features of a chat: rows of a shard's file."""

    file: Path
    start: int
    end: int

    def read(self) -> Tensor:
        """Return a row for each of the chat's tokens that are not cut off, [T, k · H]."""
        with safe_open(self.file, framework="pt") as tensors:
            part: Tensor = tensors.get_slice(_NAME)[self.start : self.end]
        return part


def stored_features(texts: Path, folder: Path, *, longest: int) -> list[StoredFeatures]:
    """Return the features of all chats, in their order. All shards have been written."""
    stored: list[StoredFeatures] = []
    for shard in shard_files(texts):
        file, start = folder / f"{shard.stem}.safetensors", 0
        for chat in read_shard(shard):
            end = start + min(len(chat.prompt) + len(chat.tokens), longest)
            stored.append(StoredFeatures(file, start, end))
            start = end
    return stored


def _run(runner: Runner, chats: Sequence[Chat], longest: int) -> Tensor:
    """Return the hidden states after all tokens of some chats, [N, k · H]."""
    parts: list[Tensor] = []
    for first in range(0, len(chats), runner.cache.slots):
        together = chats[first : first + runner.cache.slots]
        texts = [[*chat.prompt, *chat.tokens][:longest] for chat in together]
        runner.logits([RowInput(slot, 0, text, wanted=1) for slot, text in enumerate(texts)])
        assert runner.hidden is not None
        parts.append(runner.hidden.layers[: sum(map(len, texts))].cpu())
        runner.cache.clear_all()
    return torch.cat(parts)
