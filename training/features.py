"""Hidden states of a target along its texts, in files of 8-bit numbers: a student learns no less from them.

Each state has a scale of its own, so that a number is at most 6 % off, however large the largest of its state is.
N tokens, k states of H numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from training.files import write_whole
from training.texts import Chat, Report, TargetOptions, Texts, read_shard

_NUMBERS, _SCALES = "numbers", "scales"
_ROWS = 16  # texts that the target runs at once
_LARGEST = 448.0  # of float8_e4m3fn


@dataclass(frozen=True, slots=True, eq=False)
class StoredFeatures:
    """The features of a chat: rows of a shard's file."""

    file: Path
    start: int
    end: int

    def read(self) -> Tensor:
        """Return [T, k · H] bfloat16, joined states."""
        with safe_open(self.file, framework="pt") as tensors:
            numbers, scales = (tensors.get_slice(name)[self.start : self.end] for name in (_NUMBERS, _SCALES))
        states: Tensor = numbers.bfloat16().mul_(scales[..., None]).flatten(1)
        return states


def write_features(file: Path, states: Tensor, count: int) -> None:
    """Write the states of all chats of a shard, whole or not at all. states: [N, k · H]. count: k."""
    parts = states.unflatten(1, (count, -1)).float()
    scales = (parts.abs().amax(-1) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
    numbers = (parts / scales[..., None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    write_whole(file, save({_NUMBERS: numbers, _SCALES: scales}))


def features_folder(work: Path, layers: Sequence[int], longest: int) -> Path:
    """Return where the states after so many layers are, a file for each shard. longest: tokens of a text."""
    return work / "features" / f"{'-'.join(map(str, layers))}-of-{longest}"


def read_features(
    target: TargetOptions, work: Path, texts: Texts, layers: Sequence[int], report: Report
) -> tuple[list[StoredFeatures], list[StoredFeatures]]:
    """Let the target run along the shards whose hidden states are missing.

    Returns those of the chats to train on, and of those held out.
    """
    folder = features_folder(work, layers, target.longest)
    folder.mkdir(parents=True, exist_ok=True)
    missing = [shard for shard in texts.shards if not (folder / f"{shard.stem}.safetensors").exists()]
    if missing:
        runner = load_runner(replace(target.spec(), slots=_ROWS, max_length=target.longest), hidden_layers=layers)
        for number, shard in enumerate(missing, start=1):
            states = _run(runner, read_shard(shard), target.longest)
            write_features(folder / f"{shard.stem}.safetensors", states, len(layers))
            report(f"hidden states: {number:,} of {len(missing):,} shards")
    stored: list[StoredFeatures] = []
    for shard in texts.shards:
        start = 0
        for chat in read_shard(shard):
            end = start + min(len(chat.prompt) + len(chat.tokens), target.longest) - 1
            stored.append(StoredFeatures(folder / f"{shard.stem}.safetensors", start, end))
            start = end
    return texts.split(stored)


def _run(runner: Runner, chats: Sequence[Chat], longest: int) -> Tensor:
    """Return the hidden states after all tokens of some chats but the last of each, [N, k · H]."""
    parts: list[Tensor] = []
    for first in range(0, len(chats), runner.cache.slots):
        together = chats[first : first + runner.cache.slots]
        texts = [[*chat.prompt, *chat.tokens][:longest][:-1] for chat in together]
        runner.logits([RowInput(slot, 0, text, wanted=1) for slot, text in enumerate(texts)])
        assert runner.hidden is not None
        parts.append(runner.hidden.layers[: sum(map(len, texts))].cpu())
        runner.cache.clear_all()
    return torch.cat(parts)
