"""The bundled models inflated to about 300 M parameters, which write the same text, and held-out prompts."""

import subprocess
import sys
from pathlib import Path

from engine.loading.settings import load_tokenizer
from evaluation.prompts import read_prompts

HELD_OUT = Path("models/heldout.jsonl")


def inflated(name: str = "target") -> Path:
    """Return the folder of an inflated model. It is created unless it is newer than the bundled one's."""
    source, output = Path("models") / name, Path(f".bench/{name}-inflated")
    made = output / "model.safetensors"
    if not made.exists() or made.stat().st_mtime < (source / "model.safetensors").stat().st_mtime:
        command = [sys.executable, "-m", "benchmarks.tiny", "inflate", "--source", str(source), "--output", str(output)]
        subprocess.run([*command, "--force"], check=True)
    return output


def held_out_tokens(model: Path) -> list[list[int]]:
    """Return the held-out prompts as a model's token ids."""
    tokenizer = load_tokenizer(str(model))
    return [tokenizer(text)["input_ids"] for text in read_prompts(HELD_OUT)]
