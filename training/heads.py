"""Medusa or EAGLE-3 heads for a target, from nothing but the target: its texts and its hidden states along them.

The hidden states are kept in files: the target is larger than its heads, and to run it anew in every epoch would take
most of a training's time.
"""

from collections.abc import Sequence
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
from engine.heads.spec import HeadsKind, HeadsSpec
from engine.loading.checkpoint import load_model
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from training.distillation.lessons import StudentVocabulary, most_used
from training.distillation.run import Made, RunOptions, StudentRun, check_output, time_heads_of
from training.files import write_whole
from training.head_students import Eagle3Student, MedusaStudent, save_eagle3, save_medusa, start_head
from training.texts import TEXTS, Chat, Report, TargetOptions, read_shard, shard_files, special_tokens, split

_NAME = "features"
VOCABULARY = 6656
_ROWS = 16  # texts that the target runs at once
_SCALE_TEXTS = 8  # of which the size of hidden states is taken
_MADE = {"eagle3": "EAGLE-3 head", "medusa": "Medusa heads"}


@dataclass(frozen=True, slots=True, eq=False)
class StoredFeatures:
    """The features of a chat: rows of a shard's file."""

    file: Path
    start: int
    end: int

    def read(self) -> Tensor:
        with safe_open(self.file, framework="pt") as tensors:
            part: Tensor = tensors.get_slice(_NAME)[self.start : self.end]
        return part


def _features(target: TargetOptions, work: Path, layers: Sequence[int], report: Report) -> list[StoredFeatures]:
    """Let the target run along the shards whose hidden states are missing, and return those of all chats, in order."""
    folder = work / "features" / f"{'-'.join(map(str, layers))}-of-{target.longest}"
    folder.mkdir(parents=True, exist_ok=True)
    runner = load_runner(replace(target.spec(), slots=_ROWS, max_length=target.longest), hidden_layers=layers)
    stored: list[StoredFeatures] = []
    for number, shard in enumerate(shard_files(work / TEXTS), start=1):
        file, start, chats = folder / f"{shard.stem}.safetensors", 0, read_shard(shard)
        if not file.exists():
            write_whole(file, save({_NAME: _run(runner, chats, target.longest)}))
            report(f"hidden states: {number:,} shards")
        for chat in chats:
            end = start + min(len(chat.prompt) + len(chat.tokens), target.longest)
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


def train_heads(options: HeadsOptions, *, report: Report) -> None:
    """Make heads for the target. Without epochs they are what training would start from.

    Raises:
        ConfigError: as `StudentRun`, or the heads to start from can't be loaded.
    """
    check_output(options.run.output)
    checkpoint = _start_checkpoint(options)
    if checkpoint is not None:
        _load_given(checkpoint, load_model(options.run.target.spec()))  # before the texts, which take hours
    run = StudentRun(options.run, report=report)
    target = run.options.target
    model = load_model(target.spec())
    head, layers = (None, _choose_layers(options, model)) if checkpoint is None else _load_given(checkpoint, model)
    features, held_out_features = split(_features(target, run.options.work, layers, report))
    if head is None:
        size = model.config.get_text_config(decoder=True).vocab_size
        # A tokenizer may have more tokens than its model has rows.
        special = [token for token in special_tokens(run.tokenizer) if token < size]
        token_ids = most_used(run.training, options.vocabulary, special)
    else:
        token_ids = head.token_ids().tolist()
    student: MedusaStudent | Eagle3Student
    if options.kind == "medusa":
        student = _medusa_student(options.steps, model, token_ids)
        save = partial(save_medusa, student.heads, target.path)
    else:
        if head is None:
            some = torch.cat([each.read() for each in features[:_SCALE_TEXTS]])
            head = start_head(model, token_ids, some, seed=options.run.seed)
        student = _eagle3_student(options.steps, model, head, token_ids)
        save = partial(save_eagle3, head, layers, target.path)
    parameters = sum(parameter.numel() for parameter in student.module.parameters())
    report(f"start: {parameters:,} parameters, {len(token_ids):,} tokens")
    before = run.rates(student, held_out_features)
    tensors = [] if checkpoint is None else [tensor for _, tensor in sorted(checkpoint.tensors.items())]
    contents = (tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    settings = options.settings(layers)
    run.distil(student, run.folder(settings, *contents), features)
    states = "last states" if options.kind == "medusa" else f"states after {', '.join(map(str, layers))} layers"
    start = "" if options.start is None else f"{options.start} and "
    run.finish(
        Made(
            student=student,
            name=_MADE[options.kind],
            command=f"consort train heads --kind {options.kind}",
            start=f"{start}the {states} of {options.run.target.path}, {len(token_ids):,} tokens",
            parameters=parameters,
            settings=settings,
            before=before,
            save=save,
            time_steps=partial(time_heads_of, target, kind=options.kind),
        ),
        held_out_features,
    )


def _start_checkpoint(options: HeadsOptions) -> HeadsCheckpoint | None:
    """Return the checkpoint to go on from; None: start anew. Raises ConfigError if other options contradict it."""
    if options.start is None:
        return None
    if options.kind != "eagle3":
        raise ConfigError(
            f"--from {options.start}: only EAGLE-3 heads are trained further; leave it out for {options.kind}"
        )
    if options.layers is not None:
        raise ConfigError(f"--layers: the head in {options.start} names its own; leave it out")
    return read_checkpoint(HeadsSpec(name="--from", path=options.start, kind=options.kind))


def _load_given(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> tuple[Eagle3Head, tuple[int, ...]]:
    """Return a copy of a checkpoint's head, float32, and its layers. Raises ConfigError if it can't be trained here."""
    config = model.config.get_text_config(decoder=True)
    head = read_eagle3(checkpoint, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    if head.embed_tokens is not None:
        raise checkpoint.error("has an embedding of its own, which can't be trained here")
    return deepcopy(head).float(), stated_layers(checkpoint.config, config.num_hidden_layers)


def _medusa_student(steps: int, model: PreTrainedModel, token_ids: Sequence[int]) -> MedusaStudent:
    norm = getattr(model.base_model, "norm", None)
    if not isinstance(norm, torch.nn.Module):
        raise ConfigError(f"{type(model).__name__} has no final norm that Medusa heads could read after")
    output_layer: Any = model.get_output_embeddings()
    rows = output_layer.weight.detach()[torch.tensor(token_ids)].float()
    vocabulary = StudentVocabulary.of_heads(token_ids, model.config.get_text_config(decoder=True).vocab_size)
    return MedusaStudent(MedusaHeads(steps, 1, rows.shape[1]), norm, rows, vocabulary)


def _eagle3_student(steps: int, model: PreTrainedModel, head: Eagle3Head, token_ids: Sequence[int]) -> Eagle3Student:
    embedding: Any = model.get_input_embeddings()
    weight = embedding.weight.detach()
    return Eagle3Student(head, weight, StudentVocabulary.of_heads(token_ids, len(weight)), steps=steps)


def _choose_layers(options: HeadsOptions, model: PreTrainedModel) -> tuple[int, ...]:
    """Return after how many layers hidden states are read: as configured, or after about a quarter, a half and all."""
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = options.layers or (max(round(0.27 * count), 1), max(round(0.6 * count), 1), count)
    if options.kind == "eagle3" and len(layers) != 3:
        raise ConfigError(f"--layers {','.join(map(str, layers))}: an EAGLE-3 head reads the states after three layers")
    if layers[-1] != count or min(layers) < 0:
        raise ConfigError(f"--layers {','.join(map(str, layers))}: the last has to be {count}, all of the target's")
    return tuple(layers)
