"""`consort train drafter`: mistakes are one line; what a drafter starts from; a killed run makes the same drafter."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.tiny.model import load
from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec, load_model
from tests.training.commands import TARGET, failure, kill_when, run, write_target
from tests.training.distillation.chats import make_chats, make_model
from training.distillation.loop import DistillationOptions
from training.distillation.run import RunOptions
from training.drafter import DrafterOptions, load_start, write_start
from training.texts import TargetOptions, TextOptions, fitted


def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "/nowhere/model is not there" in failure("drafter", "/nowhere/model", "--output", str(tmp_path / "drafter"))
    assert list(tmp_path.iterdir()) == []


def test_a_target_without_tokenizer_is_named(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(TARGET) / name, target)
    assert "has no tokenizer" in failure("drafter", str(target), "--output", str(tmp_path / "drafter"))
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_an_output_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is there already" in failure("drafter", TARGET, "--output", str(tmp_path))


def test_texts_of_another_target_are_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"target": "models/member"}))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "00000.jsonl").touch()
    arguments = ("--output", str(tmp_path / "drafter"), "--work", str(tmp_path))
    assert "has texts with target 'models/member', not " in failure("drafter", TARGET, *arguments)


def test_a_prompt_that_leaves_no_room_is_named_before_anything_is_written(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello.\n" + "word " * 2000, encoding="utf-8")
    message = failure("drafter", TARGET, "--output", str(tmp_path / "drafter"), "--prompts", str(prompts))
    assert "--answer-tokens 256: prompt 2 has " in message
    assert "--answer-tokens 2000: a question" in failure(
        "drafter", TARGET, "--output", str(tmp_path / "drafter"), "--answer-tokens", "2000"
    )
    assert list(tmp_path.iterdir()) == [prompts]


def test_texts_are_no_longer_than_the_targets_own(tmp_path: Path) -> None:
    configuration = json.loads((Path(TARGET) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**configuration, "max_position_embeddings": 512}))
    assert fitted(TargetOptions(path=str(tmp_path))).longest == 512
    assert fitted(TargetOptions(path=TARGET, longest=64)).longest == 64


@pytest.mark.parametrize("layers", ["two", "1,x"])
def test_layers_that_are_no_numbers_are_refused(tmp_path: Path, layers: str) -> None:
    assert "--layers" in failure("drafter", TARGET, "--output", str(tmp_path / "drafter"), "--layers", layers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_makes_the_drafter_of_one_that_was_not(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_target(target)
    whole, parts = (_command(target, tmp_path / name) for name in ("whole", "parts"))
    run(whole)
    work = tmp_path / "parts-work"
    kill_when(parts, lambda: (work / "texts" / "00000.jsonl").exists())
    kill_when(parts, lambda: any(work.glob("runs/*/start")))
    kill_when(parts, lambda: any(work.glob("runs/*/checkpoints/step-[1-9]*")))
    assert not (tmp_path / "parts").exists()
    run(parts)
    files = ("config.json", "draft_vocabulary.safetensors", "model.safetensors", "tokenizer.json")
    for name in files:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    drafter = load_model(ModelSpec(name="drafter", path=str(tmp_path / "parts"), device="cpu"))
    with torch.inference_mode():
        logits = drafter(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, 2048)
    assert 64 <= int(logits[0, -1].isfinite().sum()) < 100
    report = json.loads((tmp_path / "parts" / "report.json").read_text())
    assert report["texts"] > report["held_out_texts"] > 0
    assert {rates["temperature"] for rates in report["after"]} <= {0.0, 0.7, 1.0}
    assert (tmp_path / "parts" / "report.md").read_text().startswith(f"# Drafter for {target}")


def _command(target: Path, output: Path) -> list[str]:
    options = (
        "--tokens 1200 --answer-tokens 24 --streams 8 --vocabulary 64 --layers 2 --epochs 3 --tokens-per-step 1024 "
        "--save-every 0 --threads 1 --device cpu --dtype float32"
    )
    program = [sys.executable, "-m", "cli", "train", "drafter", str(target), "--output", str(output)]
    return [*program, *options.split()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_alone_on_questions_of_ones_own(tmp_path: Path) -> None:
    target, questions = tmp_path / "target", tmp_path / "questions.txt"
    write_target(target)
    questions.write_text("import os\nclass Queue:\n")
    run([*_command(target, tmp_path / "drafter"), "--lora", "2", "--prompts", str(questions)])
    chats = [json.loads(line) for line in (tmp_path / "drafter-work/texts/00000.jsonl").read_text().splitlines()]
    assert len({tuple(chat["prompt"]) for chat in chats}) == 2
    assert not (tmp_path / "drafter" / "adapter_config.json").exists()
    load_model(ModelSpec(name="drafter", path=str(tmp_path / "drafter"), device="cpu"))
    assert json.loads((tmp_path / "drafter" / "report.json").read_text())["settings"]["lora_rank"] == 2


CHATS = make_chats(4)


def options(**given: Any) -> DrafterOptions:
    """How to make a drafter of the bundled target on the CPU."""
    run = RunOptions(
        target=TargetOptions(path=TARGET, device="cpu"),
        output=Path("unused"),
        work=Path("unused"),
        texts=TextOptions(),
        distillation=DistillationOptions(),
        tokens_per_step=1024,
    )
    return DrafterOptions(run=run, **given)


def test_layers_and_tokens_of_the_target_are_kept(tmp_path: Path) -> None:
    write_start(options(layers=3, vocabulary=10), CHATS, [0, 1, 2, 5000], tmp_path / "start")
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
    write_start(options(layers=(1, 4), vocabulary=None), CHATS, [], tmp_path / "s")
    model, vocabulary, text = load_start(tmp_path / "s")
    assert text.startswith("layers 1, 4 of models/target, 2,048 tokens")
    assert vocabulary.drafted == 2048
    assert model.config.num_hidden_layers == 2


def test_a_trimmed_drafter_is_trained_on(tmp_path: Path) -> None:
    first = options(layers=2, vocabulary=10)
    write_start(first, CHATS, [0, 1, 2], tmp_path / "first")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    tokenizer.save_pretrained(tmp_path / "first")
    again = options(model=str(tmp_path / "first"))
    write_start(again, CHATS, [0, 1, 2], tmp_path / "again")
    (model, vocabulary, _), (expected, original, _) = (load_start(tmp_path / name) for name in ("again", "first"))
    tokens = torch.arange(2048)
    assert torch.equal(vocabulary.read(tokens), original.read(tokens))
    assert all(torch.equal(weight, expected.state_dict()[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("layers", [7, 0, (3, 9)])
def test_layers_that_are_not_there_are_refused(tmp_path: Path, layers: int | tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="can't be kept"):
        write_start(options(layers=layers), CHATS, [], tmp_path / "start")
    assert not (tmp_path / "start").exists()


def test_a_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    tokenizer.add_tokens(["<|another|>"])
    tokenizer.save_pretrained(tmp_path)
    other = options(model=str(tmp_path))
    with pytest.raises(ConfigError, match=f"--from {tmp_path} has other tokens than models/target"):
        write_start(other, CHATS, [], tmp_path / "start")
