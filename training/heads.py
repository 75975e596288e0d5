"""Medusa or EAGLE-3 heads for a target, from nothing but the target: its texts and its hidden states along them.

The hidden states are kept in files: the target is larger than its heads, and to run it anew in every epoch would take
most of a training's time.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.heads.checkpoint import HeadsCheckpoint, read_checkpoint
from engine.heads.dflash import DFlashHead
from engine.heads.dflash_layout import layer_ids, read_dflash
from engine.heads.eagle3 import Eagle3Head, read_eagle3, stated_layers
from engine.heads.medusa import MedusaHeads
from engine.heads.spec import HeadsKind, HeadsSpec
from engine.loading.checkpoint import load_model
from training.dflash_student import DFlashShape, DFlashStudent, save_dflash, start_dflash
from training.distillation.lessons import Student, StudentVocabulary, most_used
from training.distillation.run import Made, RunOptions, StudentRun, check_output, time_heads_of
from training.eagle3_student import Eagle3Student, save_eagle3, start_eagle3
from training.features import StoredFeatures, read_features
from training.medusa_student import MedusaStudent, save_medusa
from training.self_student import SelfStudent
from training.texts import Report, load_target_tokenizer, special_tokens

VOCABULARY = 6656
HEAD_LAYERS = 2
RANK = 16
_SCALE_TEXTS = 8  # of which the size of hidden states is taken
_MADE = {
    "eagle3": "EAGLE-3 head",
    "medusa": "Medusa heads",
    "dflash": "DFlash head",
    "self": "Adapter to draft for itself",
}
_USUAL_PARTS = 0.27, 0.6, 1.0  # of the target's layers, after which its hidden states are read
_DFLASH_PARTS = 0.07, 0.27, 0.6, 0.8, 1.0
_USUAL_STEPS, _DFLASH_STEPS = 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsOptions:
    """How to make heads."""

    run: RunOptions
    kind: HeadsKind
    start: str | None = None  # an EAGLE-3 or DFlash head to go on from: a folder or a Hub id
    layers: tuple[int, ...] | None = None  # after how many the states are read; None: three or five
    vocabulary: int = VOCABULARY  # tokens that new heads can draft, beside the special ones
    steps: int | None = None  # of training-time test, of Medusa heads, or drafts of a new DFlash block; None: 3, 3, 5
    head_layers: int = HEAD_LAYERS  # of a new DFlash head
    rank: int = RANK  # of the weights by which a target drafts for itself

    @property
    def drafted(self) -> int:
        """The number of steps."""
        return self.steps or (_DFLASH_STEPS if self.kind in ("dflash", "self") else _USUAL_STEPS)

    def settings(self, layers: Sequence[int]) -> dict[str, object]:
        """Return the settings that the weights depend on, by name. layers: as chosen."""
        names = ("kind", "start", "vocabulary", "drafted", "head_layers", "rank")
        return {"layers": layers} | {name: getattr(self, name) for name in names}


def train_heads(options: HeadsOptions, *, report: Report) -> None:
    """Make heads for the target. Without epochs they are what training would start from.

    Raises ConfigError as `StudentRun` does, or if the heads to start from can't be loaded.
    """
    check_output(options.run.output)
    checkpoint = _start_checkpoint(options)
    load_target_tokenizer(options.run.target.path)  # what can't be loaded is named before the texts, which take hours
    model = load_model(options.run.target.spec())
    given, layers = (None, _choose_layers(options, model)) if checkpoint is None else _load_given(checkpoint, model)
    run = StudentRun(options.run, layers=layers, report=report)
    target = run.options.target
    features: Sequence[StoredFeatures] | None = None
    held_out_features: Sequence[StoredFeatures] | None = None
    if options.kind != "self":
        features, held_out_features = read_features(target, run.options.work, run.texts, layers, report)
    maker = _Maker(options=options, run=run, model=model, layers=layers, features=features or ())
    student, save = maker.make(given)
    tokens = student.vocabulary.drafted
    parameters = sum(parameter.numel() for parameter in student.module.parameters())
    report(f"start: {parameters:,} parameters, {tokens:,} tokens")
    before = run.rates(student, held_out_features)
    tensors = [] if checkpoint is None else [tensor for _, tensor in sorted(checkpoint.tensors.items())]
    contents = (tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    settings = options.settings(layers)
    run.distil(student, run.folder(settings, *contents), features, held_out_features)
    read = {"medusa": "last states", "self": "weights"}
    states = read.get(options.kind, f"states after {', '.join(map(str, layers))} layers")
    start = "" if options.start is None else f"{options.start} and "
    run.finish(
        Made(
            student=student,
            name=_MADE[options.kind],
            command=f"consort train heads --kind {options.kind}",
            start=f"{start}the {states} of {options.run.target.path}, {tokens:,} tokens",
            parameters=parameters,
            settings=settings,
            before=before,
            save=save,
            time_steps=partial(time_heads_of, target, kind=options.kind),
        ),
        held_out_features,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """Makes students of each kind, and what writes them into a folder."""

    options: HeadsOptions
    run: StudentRun
    model: PreTrainedModel
    layers: Sequence[int]  # after how many the hidden states are read
    features: Sequence[StoredFeatures]  # of the chats to train on

    def make(self, given: Eagle3Head | DFlashHead | None) -> tuple[Student, Callable[[Path], None]]:
        """given: the head to go on from; None: begin anew."""
        target = self.run.options.target.path
        if self.options.kind == "medusa":
            medusa = self._medusa()
            return medusa, partial(save_medusa, medusa.heads, target)
        if self.options.kind == "self":
            longest, seed = self.run.options.target.longest, self.options.run.seed
            own = SelfStudent(
                self.model, rank=self.options.rank, steps=self.options.drafted, longest=longest, seed=seed
            )
            return own, own.adapted.save_pretrained
        if self.options.kind == "dflash":
            block = given if isinstance(given, DFlashHead) else self._new_dflash()
            student = DFlashStudent(block, self._embedding, self._vocabulary(block))
            return student, partial(save_dflash, block, self.layers, target)
        head = given if isinstance(given, Eagle3Head) else self._new_eagle3()
        chain = Eagle3Student(head, self._embedding, self._vocabulary(head), steps=self.options.drafted)
        return chain, partial(save_eagle3, head, self.layers, target)

    @property
    def _embedding(self) -> Tensor:
        embedding: Any = self.model.get_input_embeddings()
        weight: Tensor = embedding.weight.detach()
        return weight

    def _vocabulary(self, head: Eagle3Head | DFlashHead) -> StudentVocabulary:
        return StudentVocabulary.of_heads(head.token_ids().tolist(), len(self._embedding))

    def _special(self) -> list[int]:
        """Return the special tokens. A tokenizer may have more tokens than its model has rows."""
        return [token for token in special_tokens(self.run.tokenizer) if token < len(self._embedding)]

    def _drafted(self) -> list[int]:
        """Return the tokens that new heads can draft."""
        return most_used(self.run.texts.training, self.options.vocabulary, self._special())

    def _medusa(self) -> MedusaStudent:
        norm = getattr(self.model.base_model, "norm", None)
        if not isinstance(norm, torch.nn.Module):
            raise ConfigError(f"{type(self.model).__name__} has no final norm that Medusa heads could read after")
        token_ids = self._drafted()
        output_layer: Any = self.model.get_output_embeddings()
        rows = output_layer.weight.detach()[torch.tensor(token_ids)].float()
        vocabulary = StudentVocabulary.of_heads(token_ids, len(self._embedding))
        return MedusaStudent(MedusaHeads(self.options.drafted, 1, rows.shape[1]), norm, rows, vocabulary)

    def _some_features(self) -> Tensor:
        return torch.cat([each.read() for each in self.features[:_SCALE_TEXTS]])

    def _new_eagle3(self) -> Eagle3Head:
        return start_eagle3(self.model, self._drafted(), self._some_features(), seed=self.options.run.seed)

    def _new_dflash(self) -> DFlashHead:
        shape = DFlashShape(
            layers=self.options.head_layers,
            block_size=self.options.drafted + 1,
            states=len(self.layers),
            mask_token_id=max(self._special(), default=0),  # mostly one that no text has
        )
        return start_dflash(self.model, self._drafted(), self._some_features(), shape, seed=self.options.run.seed)


def _start_checkpoint(options: HeadsOptions) -> HeadsCheckpoint | None:
    """Return the checkpoint to go on from; None: start anew. Raises ConfigError if other options contradict it."""
    if options.start is None:
        return None
    if options.kind == "medusa":
        raise ConfigError(f"--from {options.start}: Medusa heads can't be trained further; leave it out")
    given = {"--layers": options.layers, "--steps": options.steps if options.kind == "dflash" else None}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name}: the head in {options.start} has its own; leave it out")
    return read_checkpoint(HeadsSpec(name="--from", path=options.start, kind=options.kind))


def _load_given(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> tuple[Eagle3Head | DFlashHead, tuple[int, ...]]:
    """Return a copy of a checkpoint's head, float32, and its layers. Raises ConfigError if it can't be trained here."""
    config = model.config.get_text_config(decoder=True)
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    head: Eagle3Head | DFlashHead
    if checkpoint.spec.kind == "dflash":
        head, layers = read_dflash(checkpoint, **sizes), layer_ids(checkpoint)
        if head.lm_head is None:
            raise checkpoint.error("has no lm_head.weight; only heads with an output layer of their own are trained")
    else:
        head, layers = read_eagle3(checkpoint, **sizes), stated_layers(checkpoint.config, config.num_hidden_layers)
    if head.embed_tokens is not None:
        raise checkpoint.error("has an embedding of its own, which can't be trained here")
    return deepcopy(head).float(), layers


def _choose_layers(options: HeadsOptions, model: PreTrainedModel) -> tuple[int, ...]:
    """Return after how many layers hidden states are read: as configured, or the usual parts of all."""
    if options.kind == "self":
        return ()
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    parts = _DFLASH_PARTS if options.kind == "dflash" else _USUAL_PARTS
    layers = options.layers or tuple(sorted({max(round(part * count), 1) for part in parts}))
    given = f"--layers {','.join(map(str, layers))}"
    if options.kind == "eagle3" and len(layers) != 3:
        raise ConfigError(f"{given}: an EAGLE-3 head reads the states after three layers")
    if min(layers) < 0 or max(layers) > count:
        raise ConfigError(f"{given}: the target has {count} layers")
    if options.kind != "dflash" and layers[-1] != count:
        raise ConfigError(f"{given}: the last has to be {count}, all of the target's")
    return layers
