"""The quantised blocks of GGUF files as integers in groups, exactly: llama.cpp's formats, ggml/src/ggml-common.h."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.quantized_weight import QuantizedWeight, pack_codes

_Bytes = NDArray[Any]  # uint8
_Floats = NDArray[Any]  # float16 or float32
_Parts = tuple[_Bytes, _Floats, _Floats | None]  # codes [blocks, weights], scales and offsets [blocks, groups]

_NONLINEAR = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
_TABLES = {  # the numbers of codes that are no integers
    "IQ4_NL": _NONLINEAR,
    "IQ4_XS": _NONLINEAR,
    "MXFP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),  # twice E2M1's
}


def quantized_blocks(kind: str, data: _Bytes) -> QuantizedWeight:
    """Return the matrix that blocks store, or those of experts.

    kind: their type, see `BLOCKS`; data: [out, bytes of a row] or [E, out, bytes of a row].
    """
    bits, size, read = BLOCKS[kind]
    blocks, rows = data.reshape(-1, size), data.shape[:-1]
    codes, scales, offsets = read(blocks)
    return QuantizedWeight(
        codes=pack_codes(torch.from_numpy(codes.reshape(*rows, -1)), bits),
        scales=_rows(scales, rows),
        offsets=None if offsets is None else _rows(offsets, rows),
        bits=bits,
        table=torch.tensor(_TABLES[kind], dtype=torch.float32) if kind in _TABLES else None,
    )


def _rows(numbers: _Floats, rows: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers.reshape(*rows, -1)))


def _halves(blocks: _Bytes, first: int, count: int = 1) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, first : first + 2 * count]).view(np.float16)


def _nibbles(packed: _Bytes) -> _Bytes:
    """Return [..., 2 n]: all lower halves, then all upper ones. packed: [..., n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: _Bytes, width: int) -> _Bytes:
    """Return [..., 8 / width, n]: the lowest bits of all bytes, then the next. packed: [..., n]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return packed[..., None, :] >> shifts & np.uint8((1 << width) - 1)


def _fifth_bits(blocks: _Bytes, first: int) -> _Bytes:
    return np.unpackbits(blocks[:, first : first + 4], axis=1, bitorder="little") << 4


def _q4_0(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _q4_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Parts:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)) + np.uint8(128 - 16), _halves(blocks, 0), None


def _q5_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Parts:
    return blocks[:, 2:] ^ np.uint8(128), _halves(blocks, 0), None


def _iq4_nl(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _mxfp4(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 1:]), np.ldexp(np.float32(0.5), blocks[:, :1].astype(np.int32) - 127), None


def _scaled(halves: NDArray[np.float16], factors: NDArray[Any]) -> _Floats:
    """Return exact products. halves: [blocks, 1]; factors: [blocks, groups] integers of 8 bits."""
    return halves.astype(np.float32) * factors.astype(np.float32)


def _six_bits(packed: _Bytes) -> tuple[_Bytes, _Bytes]:
    """Return eight scales and eight offsets. packed: [blocks, 12]."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    return scales, np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)


def _q2_k(blocks: _Bytes) -> _Parts:
    factors, codes = blocks[:, :16], _bits(blocks[:, 16:80].reshape(-1, 2, 32), 2)
    scales, offsets = _halves(blocks, 80), _halves(blocks, 82)
    return codes.reshape(len(blocks), -1), _scaled(scales, factors & 15), -_scaled(offsets, factors >> 4)


def _q3_k(blocks: _Bytes) -> _Parts:
    high = _bits(blocks[:, :32], 1).reshape(-1, 2, 4, 32)
    codes = _bits(blocks[:, 32:96].reshape(-1, 2, 32), 2) | high << 2
    low, upper = blocks[:, 96:104], _bits(blocks[:, 104:108], 2).reshape(len(blocks), -1)
    factors = (_nibbles(low) | upper << 4).astype(np.int16) - 32
    # codes from −4 to 3, in the lower half of 4 bits with a zero of 8
    return codes.reshape(len(blocks), -1) + np.uint8(4), _scaled(_halves(blocks, 108), factors), None


def _q4_k(blocks: _Bytes) -> _Parts:
    scales, offsets = _six_bits(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return codes.reshape(len(blocks), -1), _scaled(_halves(blocks, 0), scales), -_scaled(_halves(blocks, 2), offsets)


def _q5_k(blocks: _Bytes) -> _Parts:
    scales, offsets = _six_bits(blocks[:, 4:16])
    high = _bits(blocks[:, 16:48], 1).reshape(-1, 4, 64)
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)) | high << 4
    return codes.reshape(len(blocks), -1), _scaled(_halves(blocks, 0), scales), -_scaled(_halves(blocks, 2), offsets)


def _q6_k(blocks: _Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    codes = low | _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2) << 4
    factors = blocks[:, 192:208].view(np.int8)
    return codes.reshape(len(blocks), -1) + np.uint8(128 - 32), _scaled(_halves(blocks, 208), factors), None


def _iq4_xs(blocks: _Bytes) -> _Parts:
    high = _bits(blocks[:, 2:4], 2).transpose(0, 2, 1).reshape(len(blocks), -1)
    low = _bits(blocks[:, 4:8], 4).transpose(0, 2, 1).reshape(len(blocks), -1)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    factors = (low | high << 4).astype(np.int16) - 32
    return codes.reshape(len(blocks), -1), _scaled(_halves(blocks, 0), factors), None


# By type: bits of a code in memory, bytes of a block, and the function that reads blocks.
BLOCKS: Mapping[str, tuple[int, int, Callable[[_Bytes], _Parts]]] = {
    "Q4_0": (4, 18, _q4_0),
    "Q4_1": (4, 20, _q4_1),
    "Q5_0": (8, 22, _q5_0),
    "Q5_1": (8, 24, _q5_1),
    "Q8_0": (8, 34, _q8_0),
    "Q2_K": (4, 84, _q2_k),
    "Q3_K": (4, 110, _q3_k),
    "Q4_K": (4, 144, _q4_k),
    "Q5_K": (8, 176, _q5_k),
    "Q6_K": (8, 210, _q6_k),
    "IQ4_NL": (4, 18, _iq4_nl),
    "IQ4_XS": (4, 136, _iq4_xs),
    "MXFP4": (4, 17, _mxfp4),
}
