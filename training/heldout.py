"""Held-out prompts, for tests and benchmarks."""

import json
from pathlib import Path


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a file with one `{"prompt": text}` per line."""
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]
