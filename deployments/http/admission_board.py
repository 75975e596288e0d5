"""Shared memory in which a coordinator writes, for each API key, how many more requests it accepts.

The proxy of its node reads it, refuses the others by itself, and writes down how many. Knows no HTTP. Must not import
slow modules.
"""

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from actors.wire.shared_memory import SharedOffer, attach, create
from decoding.errors import Bound
from deployments.admission.key_bounds import Reached

_BOUNDS: tuple[Bound, ...] = get_args(Bound)
_REASON_BYTES = 512  # those of keys with the longest names, too
NO_KEY = bytes(32)  # the digest of the only line where requests need no key
_NUMBER = struct.Struct("=Q")
_NOTICE = struct.Struct(f"=dIddBdIQQ{_REASON_BYTES}s")
# First the number of the node's proxy, then the lines. A line: the key's digest; how often it was written, odd while it
# is; the notice; how many requests the proxy refused.
_VERSION_AT = len(NO_KEY)
_NOTICE_AT = _VERSION_AT + _NUMBER.size
_REFUSED_AT = _NOTICE_AT + -(-_NOTICE.size // 8) * 8
_LINE_BYTES = _REFUSED_AT + _NUMBER.size


@dataclass(frozen=True, slots=True)
class Notice:
    """How many more requests of a key a coordinator accepts."""

    written_s: float  # by the monotonic clock, which processes of a node share
    requests: int
    reached: Reached  # the bound that one more would exceed
    retry_s: float  # when such a one should come again …
    apart_s: float = 0.0  # … and each further one so much later
    proxy: int = 0  # the random number of the node's proxy …
    seen: int = 0  # … and the number of its last request that the coordinator knew of then
    refused: int = 0  # how many refused requests it knew of then


class AdmissionBoard:
    """Lines of notices, one for each key. Keys go by their digests."""

    def __init__(self, memory: mmap.mmap, offer: SharedOffer) -> None:
        self._memory, self._offer = memory, offer
        lines = range(_NUMBER.size, len(memory) - _LINE_BYTES + 1, _LINE_BYTES)
        self._lines = {memory[start : start + len(NO_KEY)]: start for start in lines}

    @staticmethod
    def create(digests: Sequence[bytes]) -> "AdmissionBoard | None":
        """Create a board for keys with these digests; (): requests need no key. None: not on this system."""
        digests = digests or (NO_KEY,)
        created = create(_NUMBER.size + _LINE_BYTES * len(digests))
        if created is None:
            return None
        memory, offer = created
        for index, digest in enumerate(digests):
            start = _NUMBER.size + index * _LINE_BYTES
            memory[start : start + len(NO_KEY)] = digest
        return AdmissionBoard(memory, offer)

    @staticmethod
    def attach(name: str) -> "AdmissionBoard | None":
        """Open another process's board. None: it is out of reach, or the name is none."""
        try:
            fields = dict(zip(SharedOffer.__struct_fields__, name.split("."), strict=False))
            offer = msgspec.convert(fields, SharedOffer, strict=False)
        except msgspec.ValidationError:
            return None
        memory = attach(offer)
        return None if memory is None else AdmissionBoard(memory, offer)

    @property
    def name(self) -> str:
        """By which other processes of the node find the board."""
        return ".".join(map(str, msgspec.structs.astuple(self._offer)))

    @property
    def is_alive(self) -> bool:
        """Whether its creator lives."""
        return self._offer.is_within_reach

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key. Otherwise `NO_KEY` has the only line."""
        return NO_KEY not in self._lines

    @property
    def proxy(self) -> int:
        """The random number of the node's proxy; 0: it has not read the board yet."""
        return int(_NUMBER.unpack_from(self._memory)[0])

    @proxy.setter
    def proxy(self, number: int) -> None:
        _NUMBER.pack_into(self._memory, 0, number)

    def knows(self, key: bytes) -> bool:
        """Whether the key has a line."""
        return key in self._lines

    def write(self, key: bytes, notice: Notice) -> None:
        """Replace a notice. For the creator."""
        line = self._lines[key]
        (version,) = _NUMBER.unpack_from(self._memory, line + _VERSION_AT)
        _NUMBER.pack_into(self._memory, line + _VERSION_AT, version + 1)
        bound, reason, wait_s = notice.reached
        refusal = (notice.retry_s, notice.apart_s, _BOUNDS.index(bound), wait_s)
        known = (notice.proxy, notice.seen, notice.refused)
        values = (notice.written_s, notice.requests, *refusal, *known, reason.encode()[:_REASON_BYTES])
        _NOTICE.pack_into(self._memory, line + _NOTICE_AT, *values)
        _NUMBER.pack_into(self._memory, line + _VERSION_AT, version + 2)

    def read(self, key: bytes) -> Notice | None:
        """Return a notice; None: there is none yet, it is being written, or the key is unknown."""
        line = self._lines.get(key)
        if line is None:
            return None
        start = line + _VERSION_AT
        copied = self._memory[start : line + _REFUSED_AT]
        (version,) = _NUMBER.unpack_from(copied)
        if not version or version % 2 or _NUMBER.unpack_from(self._memory, start) != (version,):
            return None
        unpacked = _NOTICE.unpack_from(copied, _NUMBER.size)
        written_s, requests, retry_s, apart_s, bound, wait_s, proxy, seen, refused, reason = unpacked
        reached = Reached(_BOUNDS[bound], reason.rstrip(b"\0").decode(errors="replace"), wait_s)
        return Notice(written_s, requests, reached, retry_s, apart_s, proxy, seen, refused)

    def refused(self, key: bytes) -> int:
        """Return how many requests the proxy has refused."""
        return int(_NUMBER.unpack_from(self._memory, self._lines[key] + _REFUSED_AT)[0])

    def count_refused(self, key: bytes) -> None:
        """Count a refused request. For the node's only proxy."""
        _NUMBER.pack_into(self._memory, self._lines[key] + _REFUSED_AT, self.refused(key) + 1)
