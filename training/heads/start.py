"""The heads that a distillation starts from: new ones, or a given EAGLE-3 head. Must not know how they are trained."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.heads.checkpoint import HeadsCheckpoint, read_checkpoint
from engine.heads.eagle3 import Eagle3Head, read_eagle3, stated_layers
from engine.heads.medusa import MedusaHeads
from engine.heads.proposer import HeadsSpec
from training.distillation.student import Student
from training.distillation.vocabulary import StudentVocabulary
from training.heads.eagle3 import Eagle3Student, start_head
from training.heads.features import StoredFeatures
from training.heads.medusa import MedusaStudent
from training.heads.options import HeadsOptions
from training.heads.saving import save_eagle3, save_medusa

_SCALE_TEXTS = 8  # of which the size of hidden states is taken


class TrainableHeads(Protocol):
    """Heads that can be trained and written."""

    @property
    def student(self) -> Student: ...

    @property
    def parameters(self) -> int: ...

    def save(self, folder: Path) -> None: ...


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
        embedding: Any = model.get_input_embeddings()
        weight = embedding.weight.detach()
        vocabulary = StudentVocabulary.of_heads(self.token_ids, len(weight))
        student = Eagle3Student(deepcopy(self.head).float(), weight, vocabulary, steps=options.steps)
        return _Eagle3(student, self.layers, options.target.path)


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
