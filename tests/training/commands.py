"""Training commands as processes of their own, and a small target for them."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from click.testing import CliRunner
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from cli.shell import main

TARGET = "models/target"
WAIT_S = 240


def write_target(folder: Path) -> None:
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


def failure(*arguments: str) -> str:
    """Run a command of `consort train` that fails, and return its message, which is one line."""
    result = CliRunner().invoke(main, ["train", *arguments])
    assert result.exit_code != 0
    lines = result.output.strip().splitlines()
    assert lines[-1].startswith("Error: ")
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


def run(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def kill_when(command: list[str], is_time: Callable[[], bool]) -> None:
    """Start the command, and kill it as soon as a file of it is there."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + WAIT_S
    while not is_time() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    was_running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert was_running, "the run ended before it could be killed"
