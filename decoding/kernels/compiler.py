"""Builds C++ with the machine's own compiler on first use, and caches it on disk.

The functions are called through ctypes, on tensors' memory. They share torch's OpenMP threads, because that library is
already loaded under the same name.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
_log = logging.getLogger(__name__)


def load(folder: Path, flags: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Return the library of all C++ files in a folder; None if it can't be built, which only costs speed."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or ""]
    if compiler == [""]:
        _log.warning("no C++ compiler (g++ or clang++), so models run slower on this CPU than they could")
        return None
    try:
        return ctypes.CDLL(str(_build(folder, [*compiler, *_FLAGS, *flags])))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        _log.warning("the C++ part can't be built, which costs speed: %s", reason)
        return None


def _build(folder: Path, command: list[str]) -> Path:
    """Return the library's path; compile it unless it is cached."""
    texts = [path.read_text(encoding="utf-8") for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\n".join([*command, version, *texts, platform.machine(), _processor()])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "consort"
    library_path = cache / f"{folder.name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library_path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as partial:  # other processes may be building it, too
            output = Path(partial) / library_path.name
            sources = map(str, sorted(folder.glob("*.cpp")))
            subprocess.run([*command, *sources, "-o", str(output)], capture_output=True, text=True, check=True)
            output.replace(library_path)
    return library_path


def _processor() -> str:
    """Return the processor's features, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
