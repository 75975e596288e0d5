"""Which replicas have lately read which beginnings of prompts. Must not know loads, requests or links.

A prompt is known by hashes of a few of its prefixes, whose lengths grow by a quarter: some forty for 100 000 tokens.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import NamedTuple

_STEP = 16  # tokens: KV caches share whole pages of this size
_MAX_PREFIXES = 32768  # that a table remembers, some 5 MiB


class Prefix(NamedTuple):
    """A beginning of a prompt."""

    length: int  # tokens
    key: int  # hash of the tokens and the salt, 64 bits


def prefixes_of(prompt: Sequence[int], salt: str = "") -> tuple[Prefix, ...]:
    """Return prefixes of a prompt, the shortest first; none if it is shorter than a page.

    salt: KV pages are shared only with prompts of the same salt.
    """
    digest = blake2b(salt.encode(), digest_size=8)
    tokens = memoryview(array("q", prompt)).cast("B")
    prefixes, read, length = list[Prefix](), 0, _STEP
    while length <= len(prompt):
        digest.update(tokens[8 * read : 8 * length])
        prefixes.append(Prefix(length, int.from_bytes(digest.digest(), "little")))
        read, length = length, length + max(1, length // (4 * _STEP)) * _STEP
    return tuple(prefixes)


class PrefixTable:
    """The replicas that lately got each prefix. The longest unused are forgotten first."""

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # by key

    def __len__(self) -> int:
        return len(self._replicas)

    def record(self, prefixes: Sequence[Prefix], replica: str, live: Collection[str]) -> None:
        """Note that a replica reads a prompt. live: names of the replicas that need not be forgotten."""
        for _, key in reversed(prefixes):  # so that the longest go first
            others = (name for name in self._replicas.get(key, ()) if name != replica and name in live)
            self._replicas[key] = (*others, replica)
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_prefixes:
            self._replicas.popitem(last=False)

    def match(self, prefixes: Sequence[Prefix]) -> dict[str, int]:
        """Return how many of a prompt's tokens each replica has read, as far as known. Replicas with none are left out.

        The names may include replicas that are gone.
        """
        matched: dict[str, int] = {}
        for length, key in prefixes:
            names = self._replicas.get(key)
            if names is None:
                break
            matched.update(dict.fromkeys(names, length))
        return matched
