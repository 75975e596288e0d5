"""Encode logits, the only tensors that cross links: as bytes, or in memory that two processes share.

The leader creates shared memory and offers it to the member over the encrypted link. A member on the same node writes
its logits there. Where there is no shared memory, `offer` returns None and logits are sent as bytes.
"""

import math
import mmap
import os

import torch
from torch import Tensor

from actors.wire.messages import LogitsTransport, PackedLogits
from actors.wire.shared_memory import SharedOffer, attach, create


class SharedLogits:
    """Memory for one member's replies to one request. Each reply overwrites the one before."""

    def __init__(self, memory: mmap.mmap, descriptor: int | None = None) -> None:
        """descriptor: the leader's file descriptor, by which a member can open the memory until `withdraw`."""
        self._memory, self._descriptor = memory, descriptor

    def withdraw(self) -> None:
        """Close the descriptor when the request has ended. Tensors that were read stay valid."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, logits: Tensor) -> bool:
        """Write logits, [N, V] of any float type, on any device. Return False if they don't fit."""
        if logits.nbytes > len(self._memory):
            return False
        self._view(logits.dtype, logits.numel()).view(logits.shape).copy_(logits)
        return True

    def read(self, dtype: torch.dtype, positions: int, vocab_size: int) -> Tensor:
        """Return the logits last written, [N, V], without a copy. Raises ValueError for sizes that don't fit."""
        count = positions * vocab_size
        if min(positions, vocab_size) < 1 or count * dtype.itemsize > len(self._memory):
            raise ValueError(f"shared logits of shape [{positions}, {vocab_size}] don't fit the memory")
        return self._view(dtype, count).view(positions, vocab_size)

    def _view(self, dtype: torch.dtype, count: int) -> Tensor:
        return torch.frombuffer(self._memory, dtype=dtype, count=count)


def offer(size: int) -> tuple[SharedLogits, SharedOffer] | None:
    """Create shared memory of `size` bytes. Return it with the offer to send; None if the system can't share memory."""
    created = create(size)
    if created is None:
        return None
    memory, offered = created
    return SharedLogits(memory, offered.descriptor), offered


def accept(offered: SharedOffer) -> SharedLogits | None:
    """Open the leader's memory. Return None if it is out of reach: on another node, or of another user."""
    memory = attach(offered)
    return None if memory is None else SharedLogits(memory)


def pack(logits: Tensor, transport: LogitsTransport, memory: SharedLogits | None = None) -> PackedLogits:
    """Encode logits, [N, V] of any float type on any device. A type narrower than the transport's is kept.

    memory: shared by the leader, used if all logits are sent and fit.
    """
    dtype = getattr(torch, transport.dtype)
    dtype = min(dtype, logits.dtype, key=lambda candidate: candidate.itemsize)
    positions, vocab_size = logits.shape
    tokens = None
    if 0 < transport.top_k < vocab_size:
        logits, indices = logits.topk(transport.top_k, dim=-1)
        tokens = _to_bytes(indices.int())
    name, logits = str(dtype).removeprefix("torch."), logits.to(dtype)
    if tokens is None and memory is not None and memory.write(logits):
        return PackedLogits(positions, vocab_size, name, b"", shared=True)
    return PackedLogits(positions, vocab_size, name, _to_bytes(logits), tokens)


def unpack(packed: PackedLogits, device: torch.device | str = "cpu", memory: SharedLogits | None = None) -> Tensor:
    """Decode logits: [N, V] float32, −∞ for those that were not sent.

    memory: shared with the member, whose next reply overwrites it.

    Raises ValueError if sizes, types or tokens are inconsistent.
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if packed.shared and packed.dtype in dtypes and memory is not None:
        return memory.read(dtypes[packed.dtype], packed.positions, packed.vocab_size).to(device).float()
    if packed.dtype not in dtypes or packed.positions < 1 or not packed.values:
        raise ValueError(f"can't read logits: {packed.positions} positions of {packed.dtype}")
    values = _from_bytes(packed.values, dtypes[packed.dtype], packed.positions).float()
    if packed.tokens is not None:
        tokens = _from_bytes(packed.tokens, torch.int32, packed.positions).long()
        if tokens.shape != values.shape or not 0 <= int(tokens.min()) <= int(tokens.max()) < packed.vocab_size:
            raise ValueError("the tokens don't match the logits, or are outside the vocabulary")
        values = torch.full((packed.positions, packed.vocab_size), -math.inf).scatter_(-1, tokens, values)
    if values.shape[1] != packed.vocab_size:
        raise ValueError(f"{values.shape[1]} logits per position for a vocabulary of {packed.vocab_size}")
    return values.to(device)


def _to_bytes(values: Tensor) -> bytes:
    return values.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, dtype: torch.dtype, rows: int) -> Tensor:
    """Return a tensor [rows, …]."""
    if not data or len(data) % (rows * dtype.itemsize):
        raise ValueError(f"{len(data)} bytes can't hold {rows} equal rows of {dtype} logits")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(rows, -1)
