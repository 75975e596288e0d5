"""What torch does too slowly on CPUs, in C++: built with the machine's own compiler when first wanted, then kept.

The functions are called through ctypes, on tensors' memory. They share torch's OpenMP threads, whose library is loaded
already under the same name.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
# What lets loops over floats be vectorised; -ffast-math would also change how the whole process rounds.
_MATHS = (
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
    *("-fno-math-errno", "-ffinite-math-only", "-freciprocal-math"),
)
_log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions of all C++ files here; None where they can't be built, which costs speed and nothing else."""
    sources = sorted(Path(__file__).parent.glob("*.cpp"))
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        _log.warning("no C++ compiler (g++ or clang++), so models run slower on this CPU than they could")
        return None
    command = [compiler, *_FLAGS, *_MATHS]
    identity = "\n".join(
        [*command, *(source.read_text(encoding="utf-8") for source in sources), platform.machine(), _processor()]
    )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "consort"
    built = folder / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = built.with_suffix(f".{os.getpid()}")
        result = subprocess.run(
            [*command, *map(str, sources), "-o", str(partial)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            _log.warning("the C++ part can't be built, which costs speed: %s", result.stderr.strip())
            return None
        partial.rename(built)
    return ctypes.CDLL(str(built))


def _processor() -> str:
    """What the compiler builds for, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())
