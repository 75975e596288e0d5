"""The bundled target inflated to about 300 M parameters, which writes the same text. See training/inflate.py."""

import subprocess
import sys
from pathlib import Path


def inflated_target() -> Path:
    """Return its folder. The checkpoint is created unless it is newer than the bundled target's."""
    source, output = Path("models/target"), Path(".bench/target-inflated")
    made = output / "model.safetensors"
    if not made.exists() or made.stat().st_mtime < (source / "model.safetensors").stat().st_mtime:
        command = [sys.executable, "-m", "training", "inflate", "--source", str(source), "--output", str(output)]
        subprocess.run([*command, "--force"], check=True)
    return output
