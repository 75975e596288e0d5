"""Compiles Triton kernels for GPUs that are not there: what would be launched is compiled instead.

Runs in a process of its own, `python -m tests.support.kernel_compiler`, because Triton decides at import whether it
interprets. Prints a line of JSON per kernel and architecture.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

ARCHITECTURES = (80, 90)
_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def compile_launches(name: str, call: Callable[[], object]) -> None:
    """Call a function, and compile the kernels that it launches."""

    def run(kernel: Any, *args: object, grid: object, warmup: bool, **kwargs: Any) -> None:
        options = {option: kwargs.pop(option) for option in _OPTIONS if option in kwargs}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        for architecture in ARCHITECTURES:
            _compile(name, kernel, values, options, architecture)

    original, JITFunction.run = JITFunction.run, run
    try:
        call()
    finally:
        JITFunction.run = original


def _compile(name: str, kernel: Any, values: dict[str, Any], options: dict[str, Any], architecture: int) -> None:
    signature, constants, divisible = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        elif parameter.is_constexpr or (value == 1 and isinstance(value, int)):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (
            isinstance(value, int) and value % 16 == 0 and not parameter.is_constexpr
        ):
            divisible[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "case": name,
                "architecture": architecture,
                "shared_bytes": compiled.metadata.shared,
                **_usage(compiled.asm["cubin"]),
                "asynchronous_copies": compiled.asm["ptx"].count("cp.async"),
                "products": compiled.asm["ptx"].count("mma.sync") + compiled.asm["ptx"].count("wgmma.mma_async"),
            }
        ),
        flush=True,
    )


def _usage(cubin: bytes) -> dict[str, int]:
    """Return registers a thread, and bytes a thread that did not fit into them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, text
    return {"registers": int(match[1]), "stack_bytes": int(match[2])}
