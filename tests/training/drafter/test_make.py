"""`consort train drafter`: mistakes are one line; the whole command, killed on its way, makes the same drafter."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from actors.loading.checkpoint import ModelSpec, load_model
from deployments.ui.cli import main

TARGET = "models/target"
WAIT_S = 240


def failure(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["train", "drafter", *arguments])
    assert result.exit_code != 0
    lines = result.output.strip().splitlines()
    assert lines[-1].startswith("Error: ")
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "/nowhere/model is not there" in failure("/nowhere/model", "--output", str(tmp_path / "drafter"))
    assert list(tmp_path.iterdir()) == []


def test_a_target_without_tokenizer_is_named(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(TARGET) / name, target)
    assert "has no tokenizer" in failure(str(target), "--output", str(tmp_path / "drafter"))
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_an_output_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is there already" in failure(TARGET, "--output", str(tmp_path))


def test_texts_of_another_target_are_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"target": "models/member"}))
    arguments = ("--output", str(tmp_path / "drafter"), "--work", str(tmp_path))
    assert "has texts with target 'models/member', not " in failure(TARGET, *arguments)


@pytest.mark.parametrize("layers", ["two", "1,x"])
def test_layers_that_are_no_numbers_are_refused(tmp_path: Path, layers: str) -> None:
    assert "--layers" in failure(TARGET, "--output", str(tmp_path / "drafter"), "--layers", layers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_makes_the_drafter_of_one_that_was_not(tmp_path: Path) -> None:
    target = tmp_path / "target"
    _write_target(target)
    whole, parts = (_command(target, tmp_path / name) for name in ("whole", "parts"))
    _run(whole)
    work = tmp_path / "parts-work"
    _kill_when(parts, lambda: (work / "texts" / "00000.jsonl").exists())
    _kill_when(parts, lambda: any(work.glob("runs/*/start")))
    _kill_when(parts, lambda: any(work.glob("runs/*/checkpoints/step-[1-9]*")))
    assert not (tmp_path / "parts").exists()
    _run(parts)
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


def _write_target(folder: Path) -> None:
    """Write a random Qwen2 with the bundled models' tokens."""
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(TARGET).save_pretrained(folder)


def _command(target: Path, output: Path) -> list[str]:
    options = (
        "--tokens 1200 --answer-tokens 24 --streams 8 --vocabulary 64 --layers 2 --epochs 3 --tokens-per-step 1024 "
        "--save-every 0 --threads 1 --device cpu --dtype float32"
    )
    program = [sys.executable, "-m", "deployments", "train", "drafter", str(target), "--output", str(output)]
    return [*program, *options.split()]


def _run(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def _kill_when(command: list[str], is_time: Callable[[], bool]) -> None:
    """Start the command, and kill it as soon as a file of it is there."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + WAIT_S
    while not is_time() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    was_running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert was_running, "the run ended before it could be killed"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_alone_on_questions_of_ones_own(tmp_path: Path) -> None:
    target, questions = tmp_path / "target", tmp_path / "questions.txt"
    _write_target(target)
    questions.write_text("import os\nclass Queue:\n")
    _run([*_command(target, tmp_path / "drafter"), "--lora", "2", "--prompts", str(questions)])
    chats = [json.loads(line) for line in (tmp_path / "drafter-work/texts/00000.jsonl").read_text().splitlines()]
    assert len({tuple(chat["prompt"]) for chat in chats}) == 2
    assert not (tmp_path / "drafter" / "adapter_config.json").exists()
    load_model(ModelSpec(name="drafter", path=str(tmp_path / "drafter"), device="cpu"))
    assert json.loads((tmp_path / "drafter" / "report.json").read_text())["settings"]["lora_rank"] == 2
