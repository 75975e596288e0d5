"""Heads for a target, from nothing but the target: texts, its hidden states along them, distillation, a report.

Each stage leaves whole files in the work folder and is skipped where they are, so a run that was killed at any moment
goes on. Must not know the command line.
"""

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from actors.heads.checkpoint import HeadsCheckpoint, read_checkpoint
from actors.heads.eagle3 import Eagle3Head
from actors.heads.eagle3_layout import read_eagle3, stated_layers
from actors.heads.medusa import MedusaHeads
from actors.heads.spec import HeadsKind, HeadsSpec
from actors.loading.checkpoint import ModelSpec, load_model
from actors.replica.replica import load_runner
from decoding.errors import ConfigError
from training.distillation.lessons import Lessons
from training.distillation.loop import DistillationOptions, distil
from training.distillation.rates import held_out_rates
from training.distillation.report import StudentReport
from training.distillation.student import Student
from training.distillation.text_stage import (
    TEXTS,
    Report,
    TargetOptions,
    TextOptions,
    load_target_tokenizer,
    special_tokens,
    write_missing,
)
from training.distillation.vocabulary import StudentVocabulary, most_used
from training.files import whole_folder
from training.heads.eagle3 import Eagle3Student, start_head
from training.heads.features import StoredFeatures, stored_features, write_features
from training.heads.medusa import MedusaStudent
from training.heads.saving import save_eagle3, save_medusa
from training.heads.step_times import measure_heads
from training.texts import split

_ROWS = 16  # texts that the target runs at once
_SCALE_TEXTS = 8  # of which the size of hidden states is taken
_MADE = {"eagle3": "EAGLE-3 head", "medusa": "Medusa heads"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsOptions:
    """How to make heads."""

    kind: HeadsKind
    target: TargetOptions
    output: Path
    work: Path
    texts: TextOptions
    distillation: DistillationOptions
    start: str | None = None  # an EAGLE-3 head to go on from: a folder or a Hub id
    layers: tuple[int, ...] | None = None  # after how many the states are read, the last included; None: three
    vocabulary: int = 6656  # tokens that can be drafted, beside the special ones
    steps: int = 3  # of training-time test, or the number of Medusa heads
    tokens_per_step: int = 2048
    seed: int = 0


class _Made(Protocol):
    """Heads that can be trained and written."""

    @property
    def student(self) -> Student: ...

    @property
    def parameters(self) -> int: ...

    def save(self, folder: Path) -> None: ...


def train_heads(options: HeadsOptions, *, report: Report) -> None:
    """Make heads for `options.target` in the folder `options.output`.

    Raises:
        ConfigError: the target, its tokenizer or the heads to start from can't be loaded, the output is not an empty
            folder, the work folder belongs to another target, there are no texts, or the disk is full.
    """
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ConfigError(f"--output {options.output} is there already: give another, or remove it")
    target, checkpoint = options.target, _checkpoint(options)
    if checkpoint is not None:
        _given(checkpoint, load_model(_model_spec(target)))  # before the texts, which take hours
    if target.threads is not None:
        torch.set_num_threads(target.threads)
    tokenizer = load_target_tokenizer(target.path)
    training, held_out = write_missing(target, options.texts, options.work, tokenizer, report=report)
    model = load_model(_model_spec(target))
    given = None if checkpoint is None else _given(checkpoint, model)
    layers = _layers(options, model) if given is None else given.layers
    features, held_out_features = split(_features(options, layers, report))
    if given is None:
        token_ids = most_used(training, options.vocabulary, _rows_of(model, special_tokens(tokenizer)))
        new = partial(_start, options, model, layers, token_ids, features)
    else:
        token_ids = given.token_ids
        new = partial(given.start, options, model)
    heads = new()
    report(f"start: {heads.parameters:,} parameters, {len(token_ids):,} tokens")
    lessons = Lessons(
        training,
        heads.student.vocabulary,
        tokens=options.tokens_per_step,
        longest=target.longest,
        seed=options.seed,
        features=features,
    )
    run = options.work / "runs" / _run_name(options, layers, len(training), checkpoint)
    distil(heads.student, lessons, options.distillation, run / "checkpoints", report=report)

    measure = partial(
        held_out_rates,
        chats=held_out,
        tokens=options.tokens_per_step,
        longest=target.longest,
        features=held_out_features,
        bfloat16=options.distillation.bfloat16,
    )
    with whole_folder(options.output) as unfinished:
        heads.save(unfinished)
        report("measuring the heads")
        StudentReport(
            made=_MADE[options.kind],
            command=f"consort train heads --kind {options.kind}",
            target=target.path,
            start=_start_in_words(options, layers, len(token_ids)),
            parameters=heads.parameters,
            settings=_settings(options, layers),
            texts=len(training),
            tokens=sum(len(chat.tokens) for chat in training),
            held_out_texts=len(held_out),
            before=measure(new().student),
            after=measure(heads.student),
            steps=measure_heads(target, unfinished, options.kind),
        ).write(unfinished)
    report(f"{options.output}: {heads.parameters:,} parameters; see report.md there")


@dataclass(frozen=True, slots=True, eq=False)
class _Eagle3:
    student: Eagle3Student
    layers: Sequence[int]
    target: str

    @property
    def parameters(self) -> int:
        return _count(self.student.head)

    def save(self, folder: Path) -> None:
        save_eagle3(self.student.head, self.layers, self.target, folder)


@dataclass(frozen=True, slots=True, eq=False)
class _Medusa:
    student: MedusaStudent
    target: str

    @property
    def parameters(self) -> int:
        return _count(self.student.heads)

    def save(self, folder: Path) -> None:
        save_medusa(self.student.heads, self.target, folder)


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """An EAGLE-3 head to go on from."""

    head: Eagle3Head
    layers: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        """Return what it can draft."""
        return (torch.arange(len(self.head.d2t)) + self.head.d2t).tolist()

    def start(self, options: HeadsOptions, model: PreTrainedModel) -> _Made:
        """Return a copy that can be trained, float32."""
        embedding: Any = model.get_input_embeddings()
        weight = embedding.weight.detach()
        vocabulary = StudentVocabulary.of_heads(self.token_ids, len(weight))
        student = Eagle3Student(deepcopy(self.head).float(), weight, vocabulary, steps=options.steps)
        return _Eagle3(student, self.layers, options.target.path)


def _checkpoint(options: HeadsOptions) -> HeadsCheckpoint | None:
    """Return what to go on from, if anything."""
    if options.start is None:
        return None
    if options.kind != "eagle3":
        raise ConfigError(
            f"--from {options.start}: only EAGLE-3 heads are trained further; leave it out for {options.kind}"
        )
    if options.layers is not None:
        raise ConfigError(f"--layers: the head in {options.start} names its own; leave it out")
    return read_checkpoint(HeadsSpec(name="--from", path=options.start, kind=options.kind))


def _given(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> _Given:
    config = model.config.get_text_config(decoder=True)
    head = read_eagle3(checkpoint, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    if head.embed_tokens is not None:
        raise checkpoint.error("has an embedding of its own, which can't be trained here")
    return _Given(head, stated_layers(checkpoint.config, config.num_hidden_layers))


def _start(
    options: HeadsOptions,
    model: PreTrainedModel,
    layers: Sequence[int],
    token_ids: Sequence[int],
    features: Sequence[StoredFeatures],
) -> _Made:
    """Return untrained heads."""
    vocabulary = StudentVocabulary.of_heads(token_ids, model.config.get_text_config(decoder=True).vocab_size)
    embedding: Any = model.get_input_embeddings()
    output_layer: Any = model.get_output_embeddings()
    if options.kind == "eagle3":
        some = torch.cat([each.read() for each in features[:_SCALE_TEXTS]])
        head: Eagle3Head = start_head(model, token_ids, some, seed=options.seed)
        weight = embedding.weight.detach()
        return _Eagle3(Eagle3Student(head, weight, vocabulary, steps=options.steps), layers, options.target.path)
    rows = output_layer.weight.detach()[torch.tensor(token_ids)].float()
    heads = MedusaHeads(options.steps, 1, rows.shape[1])
    return _Medusa(MedusaStudent(heads, _final_norm(model), rows, vocabulary), options.target.path)


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _final_norm(model: PreTrainedModel) -> torch.nn.Module:
    """Return the norm before the output layer."""
    norm = getattr(model.base_model, "norm", None)
    if not isinstance(norm, torch.nn.Module):
        raise ConfigError(f"{type(model).__name__} has no final norm that Medusa heads could read after")
    return norm


def _layers(options: HeadsOptions, model: PreTrainedModel) -> tuple[int, ...]:
    """Return after how many layers hidden states are read: given ones, or after about a quarter, a half and all."""
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = options.layers or (max(round(0.27 * count), 1), max(round(0.6 * count), 1), count)
    if options.kind == "eagle3" and len(layers) != 3:
        raise ConfigError(f"--layers {','.join(map(str, layers))}: an EAGLE-3 head reads the states after three layers")
    if layers[-1] != count or min(layers) < 0:
        raise ConfigError(f"--layers {','.join(map(str, layers))}: the last has to be {count}, all of the target's")
    return tuple(layers)


def _features(options: HeadsOptions, layers: Sequence[int], report: Report) -> list[StoredFeatures]:
    """Let the target run along texts whose hidden states are missing, and return all."""
    target, texts = options.target, options.work / TEXTS
    folder = options.work / "features" / f"{'-'.join(map(str, layers))}-of-{target.longest}"
    runner = load_runner(
        ModelSpec(
            name="target",
            path=target.path,
            device=target.device,
            slots=_ROWS,
            max_length=target.longest,
            threads=target.threads,
        ),
        hidden_layers=layers,
    )
    for shards in write_features(runner, texts, folder, longest=target.longest):
        report(f"hidden states: {shards:,} shards")
    return stored_features(texts, folder, longest=target.longest)


def _model_spec(target: TargetOptions) -> ModelSpec:
    return ModelSpec(name="target", path=target.path, device=target.device, threads=target.threads)


def _start_in_words(options: HeadsOptions, layers: Sequence[int], tokens: int) -> str:
    start = "" if options.start is None else f"{options.start} and "
    return f"{start}the states after {', '.join(map(str, layers))} layers of {options.target.path}, {tokens:,} tokens"


def _rows_of(model: PreTrainedModel, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that the target has rows for. A tokenizer may have more."""
    size = model.config.get_text_config(decoder=True).vocab_size
    return [token for token in tokens if token < size]


def _run_name(options: HeadsOptions, layers: Sequence[int], chats: int, checkpoint: HeadsCheckpoint | None) -> str:
    """Return a name that differs where the weights of the start or of a step would."""
    fixed = replace(options, distillation=replace(options.distillation, epochs=0, minutes=None))
    name = hashlib.sha256(repr((_settings(fixed, layers), chats)).encode())
    for _, tensor in sorted(checkpoint.tensors.items()) if checkpoint is not None else ():
        name.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return name.hexdigest()[:12]


def _settings(options: HeadsOptions, layers: Sequence[int]) -> dict[str, object]:
    """Return the settings that the weights depend on, by name."""
    distillation = asdict(options.distillation)
    for name in ("save_every_s", "report_every_s", "device"):
        del distillation[name]
    names = ("kind", "start", "vocabulary", "steps", "tokens_per_step", "seed")
    given = {name: getattr(options, name) for name in names}
    return {"target": options.target.path, "longest": options.target.longest, "layers": layers} | distillation | given
