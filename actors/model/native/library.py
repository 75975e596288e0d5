"""C++ functions for what torch does too slowly on CPUs, built with the machine's own compiler on first use.

The built library is cached on disk. Functions are called through ctypes, on tensors' memory. They share torch's OpenMP
threads, because that library is already loaded under the same name.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
# Flags that let loops over floats be vectorised; -ffast-math would also change rounding in the whole process.
_MATHS = (
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
    *("-fno-math-errno", "-ffinite-math-only", "-freciprocal-math"),
)
_pointer, _size, _number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {  # each function exists for both types of numbers
    "rms_norm": [_pointer, _pointer, _number, _size, _size, _size, _pointer],
    "rotate": [_pointer] * 7,
    "silu_gate": [_pointer, _size, _size, _size, _pointer],
}
_TYPES = ("float32", "bfloat16")
_log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the functions of all C++ files in this folder; None if they can't be built, which only costs speed."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or ""]
    if compiler == [""]:
        _log.warning("no C++ compiler (g++ or clang++), so models run slower on this CPU than they could")
        return None
    try:
        return _load(_build([*compiler, *_FLAGS, *_MATHS]))
    except (OSError, RuntimeError, AttributeError, subprocess.CalledProcessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        _log.warning("the C++ part can't be built, which costs speed: %s", reason)
        return None


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    loaded.attend.argtypes, loaded.attend.restype = [_pointer], None
    for name, arguments in _ARGUMENTS.items():
        for kind in _TYPES:
            function = getattr(loaded, f"{name}_{kind}")
            function.argtypes, function.restype = arguments, None
    return loaded


def _build(command: list[str]) -> Path:
    """Return the library's path; compile it unless it is cached."""
    folder = Path(__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])]
    identity = "\n".join([*command, *texts, platform.machine(), _processor()])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "consort"
    library_path = cache / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
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
