"""The hosts in use with their tags, in a file shared by processes."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

Tags = dict[str, str]


@dataclass(slots=True)
class _Entries:
    taken: dict[str, Tags] = field(default_factory=dict)
    given_back: list[str] = field(default_factory=list)  # the most recent last


class HostBook:
    """The hosts in use. Changes are atomic, and locked against other threads and processes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def taken(self) -> dict[str, Tags]:
        """Return the tags of the hosts in use."""
        return self._read().taken

    def take(self, pool: Sequence[str], tags: Tags, count: int) -> list[str]:
        """Take `count` free hosts of a pool, those first that have been free the longest.

        So a dead host, which is given back like any other, does not keep healthy ones from use.

        Raises:
            RuntimeError: too few are free.
        """
        with self._locked_entries() as entries:
            turns = {host: turn for turn, host in enumerate(entries.given_back)}
            free = sorted((host for host in pool if host not in entries.taken), key=lambda host: turns.get(host, -1))
            if len(free) < count:
                raise RuntimeError(f"needs {count} hosts, but of {list(pool)} only {free} are free")
            chosen = free[:count]
            entries.taken |= {host: dict(tags) for host in chosen}
            return chosen

    def tag(self, host: str, tags: Tags) -> None:
        """Add tags to a host, unless it was given back meanwhile."""
        with self._locked_entries() as entries:
            if host in entries.taken:
                entries.taken[host] |= tags

    def give_back(self, host: str) -> None:
        """Free a host; nothing happens if it is free."""
        with self._locked_entries() as entries:
            if entries.taken.pop(host, None) is not None:
                entries.given_back = [other for other in entries.given_back if other != host] + [host]

    def _read(self) -> _Entries:
        try:
            return _Entries(**json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return _Entries()

    @contextmanager
    def _locked_entries(self) -> Iterator[_Entries]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self._path}.lock"):
            entries = self._read()
            yield entries
            written = self._path.with_suffix(".new")
            written.write_text(json.dumps(asdict(entries)), encoding="utf-8")
            written.replace(self._path)
