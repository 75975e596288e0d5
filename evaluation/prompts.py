"""Prompts for measurements: built in, or from a file."""

import json
from pathlib import Path

from decoding.errors import ConfigError

PROMPTS = (
    "Large Language models are",
    "Barack Obama was",
    "Decoding strategy is important because",
    "A good recipe for Halloween is",
    "Stanford is known for",
)
MAX_TOKENS = 50  # of each answer


def read_prompts(path: Path, count: int | None = None) -> list[str]:
    """Read the first prompts of a file: a .jsonl file has a "prompt" per line, any other file a text per line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()][:count]
        prompts = [json.loads(line)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"can't read prompts from {path}: {error!r}") from error
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise ConfigError(f"{path}: prompts should be one text per line, and at least one")
    return prompts
