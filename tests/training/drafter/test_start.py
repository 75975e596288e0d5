"""What a drafter starts from: the chosen layers and tokens, or a given model with the target's tokens."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from decoding.errors import ConfigError
from tests.training.distillation.chats import make_chats, make_model
from training.drafter.start import StartOptions, load_start, write_start
from training.tiny.checkpoint import load

TARGET = "models/target"
CHATS = make_chats(4)


def test_layers_and_tokens_of_the_target_are_kept(tmp_path: Path) -> None:
    options = StartOptions(target=TARGET, layers=3, vocabulary=10, device="cpu")
    write_start(options, CHATS, [0, 1, 2, 5000], tmp_path / "start")
    model, vocabulary, text = load_start(tmp_path / "start")
    target = load(Path(TARGET))
    assert vocabulary.drafted >= 10
    assert model.config.num_hidden_layers == 3
    assert text.startswith("layers 0, ")
    for index, source in ((0, 0), (2, 5)):
        name = "mlp.up_proj.weight"
        kept = model.get_parameter(f"model.layers.{index}.{name}")
        assert torch.equal(kept, target.get_parameter(f"model.layers.{source}.{name}"))
    rows = vocabulary.read(torch.tensor([0, 1, 2]))
    name = "model.embed_tokens.weight"
    assert torch.equal(model.get_parameter(name)[rows], target.get_parameter(name)[:3])


def test_layers_can_be_named(tmp_path: Path) -> None:
    write_start(StartOptions(target=TARGET, layers=(1, 4), vocabulary=None, device="cpu"), CHATS, [], tmp_path / "s")
    model, vocabulary, text = load_start(tmp_path / "s")
    assert text.startswith("layers 1, 4 of models/target, 2,048 tokens")
    assert vocabulary.drafted == 2048
    assert model.config.num_hidden_layers == 2


def test_a_trimmed_drafter_is_trained_on(tmp_path: Path) -> None:
    first = StartOptions(target=TARGET, layers=2, vocabulary=10, device="cpu")
    write_start(first, CHATS, [0, 1, 2], tmp_path / "first")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    tokenizer.save_pretrained(tmp_path / "first")
    again = StartOptions(target=TARGET, model=str(tmp_path / "first"), device="cpu")
    write_start(again, CHATS, [0, 1, 2], tmp_path / "again")
    (model, vocabulary, _), (expected, original, _) = (load_start(tmp_path / name) for name in ("again", "first"))
    tokens = torch.arange(2048)
    assert torch.equal(vocabulary.read(tokens), original.read(tokens))
    assert all(torch.equal(weight, expected.state_dict()[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("layers", [7, 0, (3, 9)])
def test_layers_that_are_not_there_are_refused(tmp_path: Path, layers: int | tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="can't be kept"):
        write_start(StartOptions(target=TARGET, layers=layers, device="cpu"), CHATS, [], tmp_path / "start")
    assert not (tmp_path / "start").exists()


def test_a_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    tokenizer.add_tokens(["<|another|>"])
    tokenizer.save_pretrained(tmp_path)
    options = StartOptions(target=TARGET, model=str(tmp_path), device="cpu")
    with pytest.raises(ConfigError, match=f"--from {tmp_path} has other tokens than models/target"):
        write_start(options, CHATS, [], tmp_path / "start")
