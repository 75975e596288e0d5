"""Heads are tested on the target's own text when they are loaded, and refused with advice."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.errors import ConfigError
from engine.heads.dflash import DFlashHead
from engine.heads.dflash_layout import stored_dflash
from engine.heads.loader import load_heads
from engine.heads.proposer import HeadProposer
from engine.heads.spec import HeadsSpec
from engine.layers.quantized_linear import QuantizedLinear, computes_integers, round_linears
from engine.model.runner import Runner
from tests.support.heads import STATES, greedy_texts, medusa_tensors, new_dflash, save, trained_dflash, trained_eagle3
from tests.support.models import VOCAB, tiny_model

TARGET = tiny_model("llama-gqa")
TEXTS = greedy_texts(TARGET, [[(7 + 131 * index) % VOCAB] for index in range(8)], 31)


def load(spec: HeadsSpec) -> HeadProposer:
    runner = Runner(TARGET, slots=8, max_length=64, max_query=64)
    loaded = load_heads(spec, TARGET)
    loaded.prepare(runner)
    proposer = loaded.proposer(runner)
    assert runner.cache.allocator.used == 0
    return proposer


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3")
    head = trained_eagle3(TARGET, TEXTS, steps=100)
    config = head.layers[0].self_attn.config  # type: ignore[union-attr]
    config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    return save(folder, dict(head.state_dict()))


def spec(folder: Path, kind: str, **options: object) -> HeadsSpec:
    return HeadsSpec(name="endpoints.e.heads", path=str(folder), kind=kind, **options)  # type: ignore[arg-type]


def test_medusa_heads_that_know_the_target_are_taken(tmp_path: Path) -> None:
    proposer = load(spec(save(tmp_path, medusa_tensors(TARGET, TEXTS)), "medusa", tree=[[0], [1], [0, 0]]))
    assert (proposer.kind, proposer.length, proposer.tree) == ("medusa", 3, [[0], [1], [0, 0]])


def test_random_heads_are_refused_unless_they_are_wanted(tmp_path: Path) -> None:
    tensors = {name: torch.randn(tensor.shape) for name, tensor in medusa_tensors(TARGET, TEXTS).items()}
    folder = save(tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"endpoints\.e\.heads: \d+% of the first draft tokens .* poorly trained"):
        load(spec(folder, "medusa"))
    assert load(spec(folder, "medusa", min_acceptance=0.0)).kind == "medusa"


def test_heads_of_a_quantised_target_have_4_bits(eagle3: Path) -> None:
    """Their inputs are rounded, too, where that is faster: only the target's bits decide what is written."""
    target = deepcopy(TARGET)
    round_linears(target, 8)
    loaded = load_heads(spec(eagle3, "eagle3", layers=STATES, min_acceptance=0.0), target)
    layers = [layer for layer in loaded.module.modules() if isinstance(layer, QuantizedLinear)]
    rounds = computes_integers(torch.device("cpu"))
    assert {(layer.bits, layer.rounds_inputs) for layer in layers} == {(4, rounds)}


def test_an_eagle3_head_on_the_right_layers_is_taken(eagle3: Path) -> None:
    assert load(spec(eagle3, "eagle3", layers=STATES)).kind == "eagle3"


def test_wrong_layers_are_refused_and_better_ones_named(eagle3: Path) -> None:
    with pytest.raises(ConfigError, match=r"read after \[0, 1, 2\] layers.*with `layers: \[1, 2, 3\]` they are \d+%"):
        load(spec(eagle3, "eagle3", layers=(0, 1, 2), min_acceptance=0.8))


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = trained_dflash(TARGET, TEXTS, steps=60)
    return save_dflash(head, tmp_path_factory.mktemp("dflash"))


def save_dflash(head: DFlashHead, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tensors, config = stored_dflash(head, STATES, "target")
    (folder / "config.json").write_text(json.dumps(config))
    return save(folder, tensors)


def test_a_dflash_head_on_the_right_layers_is_taken(dflash: Path) -> None:
    proposer = load(spec(dflash, "dflash"))
    assert (proposer.kind, proposer.length, proposer.chained) == ("dflash", 4, False)
    with pytest.raises(ConfigError, match=r"read after \[0, 1, 2\] layers.*with `layers: \[1, 2, 3\]` they are \d+%"):
        load(spec(dflash, "dflash", layers=(0, 1, 2), min_acceptance=0.8))


def test_copies_of_the_targets_layers_are_dropped(tmp_path: Path) -> None:
    head = new_dflash(TARGET, own_embedding=True)
    assert head.embed_tokens is not None
    assert head.lm_head is not None
    own = load_heads(spec(save_dflash(head, tmp_path / "own"), "dflash"), TARGET).module
    target: Any = TARGET
    head.embed_tokens.weight.data = target.get_input_embeddings().weight.data.clone()
    head.lm_head.weight.data = target.get_output_embeddings().weight.data.clone()
    shared = load_heads(spec(save_dflash(head, tmp_path / "shared"), "dflash"), TARGET).module
    assert {"embed_tokens.weight", "lm_head.weight"} == own.state_dict().keys() - shared.state_dict().keys()


def test_sliding_layers_that_see_both_ways_are_refused(tmp_path: Path) -> None:
    folder = save_dflash(new_dflash(TARGET, windowed=True, causal=(False, False)), tmp_path)
    with pytest.raises(ConfigError, match="sliding layers whose blocks see both ways"):
        load(spec(folder, "dflash"))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("eagle3", {"layers": (1, 2)}, "has 2 numbers, but the head reads 3"),
        ("eagle3", {"layers": (1, 2, 9)}, "after 9 layers; the model has 3"),
        ("eagle3", {"tree": [[0]]}, "static trees are for medusa"),
        ("dflash", {"layers": (1, 2)}, "has 2 numbers, but the head reads 3"),
        ("dflash", {"tree": [[0]]}, "static trees are for medusa"),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    eagle3: Path, dflash: Path, kind: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(spec(eagle3 if kind == "eagle3" else dflash, kind, **options))
