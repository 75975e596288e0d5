"""Compiles Triton kernels for GPUs that are not there: what would be launched is compiled instead.

Runs in a process of its own, `python -m tests.support.kernel_compiler`, because Triton decides at import whether it
interprets. Prints a line of JSON per kernel and architecture.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

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


def compile_launches(name: str, call: Callable[[], object], architectures: Sequence[int] = ARCHITECTURES) -> None:
    """Call a function, and compile the kernels that it launches."""

    def run(kernel: Any, *args: object, grid: object, warmup: bool, **kwargs: Any) -> None:
        options = {option: kwargs.pop(option) for option in _OPTIONS if option in kwargs}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        for architecture in architectures:
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
        is_special = isinstance(value, int) and not (parameter.is_constexpr or parameter.do_not_specialize)
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype][1:]}{value.block_shape}>"
        elif parameter.is_constexpr or (is_special and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        is_tensor = isinstance(value, torch.Tensor)
        if (is_tensor and not parameter.do_not_specialize_on_alignment) or (is_special and value % 16 == 0):
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


STATES: dict[str, dict[str, Any]] = {  # of Qwen3-Next, Kimi Linear, Nemotron-H and Jamba
    "delta rule": {"heads": 32, "groups": 16, "key": 128, "value": 128, "decays": 1, "delta": True},
    "decays of rows": {"heads": 32, "groups": 32, "key": 128, "value": 128, "decays": 128, "delta": True},
    "mamba 2": {"heads": 128, "groups": 8, "key": 128, "value": 64, "decays": 1},
    "mamba 1": {"heads": 1, "groups": 1, "key": 16, "value": 8192, "decays": 8192, "rates": True},
}


def _launch_recurrence(
    heads: int, groups: int, key: int, value: int, decays: int, delta: bool = False, rates: bool = False
) -> None:
    from engine.kernels.state import RING, Recurrence
    from engine.kernels.triton_state import recur

    keys, zeros = torch.zeros(2, groups, key), partial(torch.zeros, dtype=torch.float32)
    recur(
        Recurrence(
            query=keys,
            key=keys,
            value=zeros(2, heads, value),
            decay=zeros(2, heads, decays),
            rates=zeros(heads, key, value) if rates else None,
            beta=zeros(2, heads) if delta else None,
            states=zeros(2, heads, key, value),
            ring=zeros(2, RING, groups * key + heads * (value + decays + 1)),
            batch=_batch(),
            normalises=delta,
            scale=0.1,
        )
    )


def _launch_convolution() -> None:
    from engine.kernels.state import RING, Convolution
    from engine.kernels.triton_state import convolve

    x, ring = torch.zeros(2, 8192, dtype=torch.bfloat16), torch.zeros(2, RING, 8192, dtype=torch.bfloat16)
    convolve(Convolution(x, x.new_zeros(8192, 4), None, ring, _batch(), silu=True))


def _batch() -> Any:
    from engine.kernels.state import StateRow
    from engine.model.ragged_batch import RowInput, pack_inputs

    return pack_inputs([RowInput(0, 0, [0, 0])], spare_slot=1, states=[StateRow(0, 0, 2)]).unpack()[2]


def main() -> None:
    """Compile all kernels with the shapes of an 8 B model in bfloat16."""
    from benchmarks.gpu.kernels import text_batch
    from decoding.kernels.triton_choice import choose
    from engine.kernels import triton_elementwise as elementwise
    from engine.kernels import triton_linear as linear
    from engine.kernels.attention import AttentionArgs, Reach
    from engine.kernels.triton_attention import attend
    from engine.kernels.triton_elementwise import fixed_order_rms_norm
    from engine.kernels.triton_quantized_experts import fixed_order_experts
    from engine.kernels.triton_quantized_linear import fixed_order_quantized_linear
    from tests.support.quantized import Layout, experts_of, random_weight

    def launch_attention(cache: torch.dtype, heads: int = 32, **options: Any) -> None:
        batch, tables = text_batch(4, 6, 2048, "cpu")
        query, new = (torch.zeros(24, count, 128, dtype=torch.bfloat16) for count in (heads, 8))
        keys, values = (torch.zeros(1, 8, *shape).to(cache) for shape in ((128, 16), (16, 128)))
        attend(AttentionArgs(query, new, new, keys, values, tables, batch, scale=0.1, **options))

    def launch_latent_attention() -> None:
        batch, tables = text_batch(4, 6, 2048, "cpu")
        query, new, keys = (
            torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((24, 128, 576), (24, 1, 576), (1, 1, 576, 16))
        )
        attend(AttentionArgs(query, new, new[..., :512], keys, None, tables, batch, scale=0.1))

    compile_launches("latents", launch_latent_attention)
    compile_launches("bfloat16", lambda: launch_attention(torch.bfloat16))
    compile_launches("wide groups", lambda: launch_attention(torch.bfloat16, heads=64))
    compile_launches(
        "float8", lambda: launch_attention(torch.float8_e4m3fn, reach=Reach(128), softcap=30.0, sinks=torch.zeros(32))
    )
    compile_launches("choice", lambda: choose(torch.zeros(4, 128256), torch.zeros(4, 6, dtype=torch.float64), 1))
    weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
    gpus = {80: linear._Gpu(108, 163 << 10, copies_tiles=False), 90: linear._Gpu(132, 227 << 10, copies_tiles=True)}
    for architecture, tokens in product(ARCHITECTURES, (6, 48, 96, 2048)):
        with mock.patch.object(linear, "_gpu", return_value=gpus[architecture]):
            launch = partial(linear.fixed_order_linear, weight[:tokens], weight)
            compile_launches(f"{tokens} tokens", launch, [architecture])
    for bits, offsets in ((4, True), (8, False)):
        quantized = random_weight(Layout(bits, 32, 4096, 4096, offsets, torch.float16))
        compile_launches(f"{bits} bits", partial(fixed_order_quantized_linear, weight[:6], quantized))
        of_experts = experts_of(Layout(bits, 32, 1024, 4096, offsets, torch.float16), 4)
        rows = torch.arange(6) % 4
        compile_launches(f"experts of {bits} bits", partial(fixed_order_experts, weight[:6], rows, of_experts))
    compile_launches("norm", lambda: fixed_order_rms_norm(weight, weight[0], 1e-6))
    for name, options in STATES.items():
        compile_launches(name, partial(_launch_recurrence, **options))
    compile_launches("convolution", _launch_convolution)
    heads = weight.view(1, 32, 4096, 128)
    compile_launches("rotation", lambda: elementwise.rotate(heads, heads[:, :8], heads[:, 0], heads[:, 1]))
    compile_launches("gate", lambda: elementwise.silu_gate(weight))


if __name__ == "__main__":
    main()
