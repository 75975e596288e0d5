"""Attention over KV slots on CPUs, in C++: built with the machine's own compiler when it is first wanted, then kept.

torch's attention for CPUs is made for long queries; the one to some tokens of decoding and verification take several
times as long as they need to (docs/experiments.md). Where there is no compiler, it is used all the same.
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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from actors.attention import SlotBatch

MAX_WIDTH = 32  # tokens per row; of more, as in prompts, torch is faster
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math")
_FLAGS_LESS_CHECKS = ("-fno-math-errno", "-ffinite-math-only", "-std=c++17", "-shared", "-fPIC")
_NAMES = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}
_log = logging.getLogger(__name__)


class _Shape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("rows", "heads", "kv_heads", "head_dim", "capacity", "width", "length", "threads"),
            *("query_token", "query_head", "key_token", "key_head", "value_token", "value_head"),
        )
    ]


def can_attend(query: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether `attend` can do it: on a CPU, few tokens per row, keys and values of one size, and a compiler at hand.

    query, value: [1, heads, N, head_dim]; mask: [B, Q, L].
    """
    return (
        query.device.type == "cpu"
        and mask.shape[1] <= MAX_WIDTH
        and query.dtype in _NAMES
        and query.shape[-1] == value.shape[-1]
        and _library() is not None
    )


def attend(
    query: Tensor,  # [1, heads, N, head_dim]
    key: Tensor,  # [1, kv_heads, N, head_dim]
    value: Tensor,
    keys: Tensor,  # [slots + 1, kv_heads, capacity, head_dim]
    values: Tensor,
    batch: "SlotBatch",
    mask: Tensor,  # [B, Q, L]
    scale: float,
) -> Tensor:
    """Write the new keys and values to their slots, then attend to the columns of each row: [1, N, heads, head_dim]."""
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    _, heads, tokens, head_dim = query.shape
    output = query.new_empty(1, tokens, heads, head_dim)
    shape = _Shape(
        *(len(batch.rows), heads, key.shape[1], head_dim, keys.shape[2], *mask.shape[1:], torch.get_num_threads()),
        *(states.stride(axis) for states in (query, key, value) for axis in (2, 1)),
    )
    tensors = (query, key, value, keys, values, *batch[:5], mask)
    library = _library()
    assert library is not None
    function = getattr(library, _NAMES[query.dtype])
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    function(ctypes.byref(shape), *pointers, ctypes.c_float(scale), ctypes.c_void_p(output.data_ptr()))
    return output


@functools.cache
def _library() -> ctypes.CDLL | None:
    source = Path(__file__).with_name("attention.cpp")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        _log.warning("no C++ compiler (g++ or clang++), so attention on this CPU is slower than it could be")
        return None
    command = [compiler, *_FLAGS, *_FLAGS_LESS_CHECKS]
    identity = "\n".join([*command, source.read_text(encoding="utf-8"), platform.machine(), _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "consort"
    built = folder / f"attention-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = built.with_suffix(f".{os.getpid()}")
        result = subprocess.run(
            [*command, str(source), "-o", str(partial)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            _log.warning("attention for this CPU can't be built, which costs speed: %s", result.stderr.strip())
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
