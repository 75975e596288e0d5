"""The bundled target at a realistic cost: the same text from about 300 M parameters. See training/inflate.py."""

import subprocess
import sys
from pathlib import Path


def inflated_target() -> Path:
    """Its folder; made once per bundled target."""
    source, output = Path("models/target"), Path(".bench/target-inflated")
    made = output / "model.safetensors"
    if not made.exists() or made.stat().st_mtime < (source / "model.safetensors").stat().st_mtime:
        command = [sys.executable, "-m", "training", "inflate", "--source", str(source), "--output", str(output)]
        subprocess.run([*command, "--force"], check=True)
    return output
