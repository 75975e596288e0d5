"""Medusa or EAGLE-3 heads for a target, from nothing but the target: its texts and its hidden states along them.

The hidden states are kept in files: the target is larger than its heads, and to run it anew in every epoch would take
most of a training's time.
"""

from collections.abc import Callable, Generator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.heads.checkpoint import HeadsCheckpoint, read_checkpoint
from engine.heads.eagle3 import Eagle3Head, read_eagle3, stated_layers
from engine.heads.medusa import MedusaHeads
from engine.heads.proposer import HeadsKind, HeadsSpec
from engine.loading.checkpoint import load_model
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from training.distillation.lessons import Student, StudentVocabulary, most_used
from training.distillation.report import time_heads_of
from training.distillation.run import Made, RunOptions, StudentRun, check_output
from training.files import write_whole
from training.heads.eagle3 import Eagle3Student, save_eagle3, start_head
from training.heads.medusa import MedusaStudent, save_medusa
from training.texts import TEXTS, Chat, Report, TargetOptions, read_shard, shard_files, special_tokens, split

_NAME = "features"
VOCABULARY = 6656
_ROWS = 16  # texts that the target runs at once
_SCALE_TEXTS = 8  # of which the size of hidden states is taken
_MADE = {"eagle3": "EAGLE-3 head", "medusa": "Medusa heads"}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsOptions:
    """How to make heads."""

    run: RunOptions
    kind: HeadsKind
    start: str | None = None  # an EAGLE-3 head to go on from: a folder or a Hub id
    layers: tuple[int, ...] | None = None  # after how many the states are read, the last included; None: three
    vocabulary: int = VOCABULARY  # tokens that new heads can draft, beside the special ones
    steps: int = 3  # of training-time test, or the number of Medusa heads

    def settings(self, layers: Sequence[int]) -> dict[str, object]:
        """Return the settings that the weights depend on, by name. layers: as chosen."""
        names = ("kind", "start", "vocabulary", "steps")
        return {"layers": layers} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class TrainableHeads:
    """Heads that can be trained and written."""

    student: Student
    parameters: int
    save: Callable[[Path], None]


@dataclass(frozen=True, slots=True, eq=False)
class GivenHead:
    """An EAGLE-3 head to go on from."""

    head: Eagle3Head
    layers: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens that it can draft."""
        ids: list[int] = self.head.token_ids().tolist()
        return ids

    def start(self, options: HeadsOptions, model: PreTrainedModel) -> TrainableHeads:
        """Return a copy that can be trained, float32."""
        return _eagle3(deepcopy(self.head).float(), options, model, self.layers, self.token_ids)


def train_heads(options: HeadsOptions, *, report: Report) -> None:
    """Make heads for the target. Without epochs they are what training would start from.

    Raises:
        ConfigError: as `StudentRun`, or the heads to start from can't be loaded.
    """
    check_output(options.run.output)
    checkpoint = read_start_checkpoint(options)
    if checkpoint is not None:
        load_given(checkpoint, load_model(options.run.target.spec()))  # before the texts, which take hours
    run = StudentRun(options.run, report=report)
    target = run.options.target
    model = load_model(target.spec())
    given = None if checkpoint is None else load_given(checkpoint, model)
    layers = choose_layers(options, model) if given is None else given.layers
    features, held_out_features = split(_features(target, run.options.work, layers, report))
    if given is None:
        size = model.config.get_text_config(decoder=True).vocab_size
        # A tokenizer may have more tokens than its model has rows.
        special = [token for token in special_tokens(run.tokenizer) if token < size]
        token_ids = most_used(run.training, options.vocabulary, special)
        heads = new_heads(options, model, layers, token_ids, features)
    else:
        token_ids = given.token_ids
        heads = given.start(options, model)
    report(f"start: {heads.parameters:,} parameters, {len(token_ids):,} tokens")
    before = run.rates(heads.student, held_out_features)
    tensors = [] if checkpoint is None else [tensor for _, tensor in sorted(checkpoint.tensors.items())]
    contents = (tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    run.distil(heads.student, run.folder(options.settings(layers), *contents), features)
    run.finish(
        Made(
            student=heads.student,
            name=_MADE[options.kind],
            command=f"consort train heads --kind {options.kind}",
            start=_start_in_words(options, layers, len(token_ids)),
            parameters=heads.parameters,
            before=before,
            save=heads.save,
            time_steps=partial(time_heads_of, target, kind=options.kind),
        ),
        options.settings(layers),
        held_out_features,
    )


def read_start_checkpoint(options: HeadsOptions) -> HeadsCheckpoint | None:
    """Return the checkpoint to go on from; None: start anew.

    Raises:
        ConfigError: it can't be read, or other options contradict it.
    """
    if options.start is None:
        return None
    if options.kind != "eagle3":
        raise ConfigError(
            f"--from {options.start}: only EAGLE-3 heads are trained further; leave it out for {options.kind}"
        )
    if options.layers is not None:
        raise ConfigError(f"--layers: the head in {options.start} names its own; leave it out")
    return read_checkpoint(HeadsSpec(name="--from", path=options.start, kind=options.kind))


def load_given(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> GivenHead:
    """Return the head of a checkpoint. Raises ConfigError if it doesn't fit the target, or can't be trained."""
    config = model.config.get_text_config(decoder=True)
    head = read_eagle3(checkpoint, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    if head.embed_tokens is not None:
        raise checkpoint.error("has an embedding of its own, which can't be trained here")
    return GivenHead(head, stated_layers(checkpoint.config, config.num_hidden_layers))


def new_heads(
    options: HeadsOptions,
    model: PreTrainedModel,
    layers: Sequence[int],
    token_ids: Sequence[int],
    features: Sequence[StoredFeatures],
) -> TrainableHeads:
    """Return untrained heads."""
    if options.kind == "eagle3":
        some = torch.cat([each.read() for each in features[:_SCALE_TEXTS]])
        return _eagle3(start_head(model, token_ids, some, seed=options.run.seed), options, model, layers, token_ids)
    vocabulary = StudentVocabulary.of_heads(token_ids, model.config.get_text_config(decoder=True).vocab_size)
    output_layer: Any = model.get_output_embeddings()
    rows = output_layer.weight.detach()[torch.tensor(token_ids)].float()
    heads = MedusaHeads(options.steps, 1, rows.shape[1])
    student = MedusaStudent(heads, _final_norm(model), rows, vocabulary)
    return TrainableHeads(student, _count(heads), partial(save_medusa, heads, options.run.target.path))


def _eagle3(
    head: Eagle3Head, options: HeadsOptions, model: PreTrainedModel, layers: Sequence[int], token_ids: Sequence[int]
) -> TrainableHeads:
    embedding: Any = model.get_input_embeddings()
    weight = embedding.weight.detach()
    student = Eagle3Student(head, weight, StudentVocabulary.of_heads(token_ids, len(weight)), steps=options.steps)
    return TrainableHeads(student, _count(head), partial(save_eagle3, head, layers, options.run.target.path))


def choose_layers(options: HeadsOptions, model: PreTrainedModel) -> tuple[int, ...]:
    """Return after how many layers hidden states are read: as configured, or after about a quarter, a half and all.

    Raises:
        ConfigError: the configured layers don't fit the target or the kind of heads.
    """
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = options.layers or (max(round(0.27 * count), 1), max(round(0.6 * count), 1), count)
    if options.kind == "eagle3" and len(layers) != 3:
        raise ConfigError(f"--layers {','.join(map(str, layers))}: an EAGLE-3 head reads the states after three layers")
    if layers[-1] != count or min(layers) < 0:
        raise ConfigError(f"--layers {','.join(map(str, layers))}: the last has to be {count}, all of the target's")
    return tuple(layers)


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _final_norm(model: PreTrainedModel) -> torch.nn.Module:
    """Return the norm before the output layer."""
    norm = getattr(model.base_model, "norm", None)
    if not isinstance(norm, torch.nn.Module):
        raise ConfigError(f"{type(model).__name__} has no final norm that Medusa heads could read after")
    return norm


def _features(target: TargetOptions, work: Path, layers: Sequence[int], report: Report) -> list[StoredFeatures]:
    """Let the target run along texts whose hidden states are missing, and return all."""
    texts, folder = work / TEXTS, work / "features" / f"{'-'.join(map(str, layers))}-of-{target.longest}"
    runner = load_runner(replace(target.spec(), slots=_ROWS, max_length=target.longest), hidden_layers=layers)
    for shards in write_features(runner, texts, folder, longest=target.longest):
        report(f"hidden states: {shards:,} shards")
    return stored_features(texts, folder, longest=target.longest)


def _start_in_words(options: HeadsOptions, layers: Sequence[int], tokens: int) -> str:
    start = "" if options.start is None else f"{options.start} and "
    states = "last states" if options.kind == "medusa" else f"states after {', '.join(map(str, layers))} layers"
    return f"{start}the {states} of {options.run.target.path}, {tokens:,} tokens"
