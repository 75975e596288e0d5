"""Loads heads for a model that is loaded already, and says what its runner has to keep for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.heads.acceptance import check_acceptance
from engine.heads.checkpoint import HeadsCheckpoint, read_checkpoint
from engine.heads.eagle3 import Eagle3Head
from engine.heads.eagle3_layout import read_eagle3, stated_layers
from engine.heads.eagle3_proposer import Eagle3Proposer, graph_count
from engine.heads.medusa_layout import read_medusa
from engine.heads.medusa_proposer import MedusaProposer
from engine.heads.proposer import HeadProposer
from engine.heads.spec import HeadsSpec
from engine.model.faster_layers import use_faster_parts
from engine.model.runner import Runner


@dataclass(frozen=True, slots=True, eq=False)
class LoadedHeads:
    """Heads beside their target, before there is a runner."""

    spec: HeadsSpec
    module: torch.nn.Module
    layers: tuple[int, ...]  # after how many layers the runner keeps hidden states
    column_numbers: int  # that they keep for each token in the target's pages
    graph_count: Callable[[int, int], int]  # number of their CUDA graphs, given a runner's slots and max_query
    _make: Callable[[Runner], HeadProposer]

    def prepare(self, runner: Runner) -> None:
        """Let a runner keep what they read. Call it before the runner's first call."""
        try:
            runner.keep_hidden_states(self.layers)
        except ConfigError as error:
            raise ConfigError(f"{self.spec.name}: {error}") from error

    def proposer(self, runner: Runner) -> HeadProposer:
        """Return the heads over a runner with an empty cache, after a test on the target's own text.

        Raises:
            ConfigError: too few of their first draft tokens are the target's.
        """
        use_faster_parts(self.module)
        proposer = self._make(runner)
        check_acceptance(self.spec, proposer, runner, self.layers)
        return proposer


def load_heads(spec: HeadsSpec, model: PreTrainedModel) -> LoadedHeads:
    """Load heads to the device of a target's output layer, in the target's type.

    Raises:
        ConfigError: they can't be read, or are not for this target.
    """
    checkpoint = read_checkpoint(spec)
    load = _load_medusa if spec.kind == "medusa" else _load_eagle3
    return load(checkpoint, model)


def _load_medusa(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> LoadedHeads:
    spec, config = checkpoint.spec, model.config.get_text_config()
    if spec.layers is not None:
        raise ConfigError(f"{spec.name}.layers: medusa heads read the last hidden state only; remove the key")
    heads = read_medusa(checkpoint, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    _place(heads, model)
    return LoadedHeads(spec, heads, (), 0, lambda slots, max_query: 0, partial(MedusaProposer, heads, tree=spec.tree))


def _load_eagle3(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> LoadedHeads:
    spec, config = checkpoint.spec, model.config.get_text_config()
    if spec.tree is not None:
        raise ConfigError(f"{spec.name}.tree: static trees are for medusa heads; remove the key")
    head = read_eagle3(checkpoint, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    layers = tuple(spec.layers or stated_layers(checkpoint.config, config.num_hidden_layers))
    states = head.feature_size // config.hidden_size
    if len(layers) != states:
        raise ConfigError(f"{spec.name}.layers: has {len(layers)} numbers, but the head reads {states} hidden states")
    _place(head, model)
    return LoadedHeads(spec, head, layers, head.column_numbers, graph_count, partial(_make_eagle3, head))


def _make_eagle3(head: Eagle3Head, runner: Runner) -> Eagle3Proposer:
    proposer = Eagle3Proposer(head, runner)
    proposer.warm_up()
    return proposer


def _place(module: torch.nn.Module, model: PreTrainedModel) -> None:
    """Move heads to the target's last device. Only their weights get its type, not the rotary frequencies."""
    output_layer = model.get_output_embeddings()
    parameters = [] if output_layer is None else [*output_layer.parameters(), *output_layer.buffers()]
    module.to(parameters[0].device if parameters else model.device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(model.dtype)
    module.eval().requires_grad_(False)
