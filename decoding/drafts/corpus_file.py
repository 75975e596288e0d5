"""A corpus's texts on disk, from which the next replica begins."""

import fcntl
import shutil
import struct
import weakref
from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import BinaryIO

import msgspec

_LENGTH = struct.Struct("<I")


class CorpusFile:
    """The first file of a folder that no other replica holds, and the one that it replaced when it was full."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """most_bytes: of each of the two.

        Raises:
            OSError: the folder can't be written.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in count():
            self._path = folder / f"{number}.texts"
            self._file: BinaryIO = self._path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed, or the process ends
                break
            except BlockingIOError:
                self._file.close()
        weakref.finalize(self, self._file.close)
        self._path.chmod(0o600)
        self._full, self._most_bytes = self._path.with_suffix(".full"), most_bytes

    def read(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield salts and texts, the oldest first. What a crash has left of the last one is cut off."""
        if self._full.exists():
            with self._full.open("rb") as file:
                yield from _texts(file)
        self._file.seek(0)
        yield from _texts(self._file)
        self._file.truncate()

    def append(self, salt: str, tokens: Sequence[int]) -> None:
        record = msgspec.msgpack.encode((salt, array("i", tokens).tobytes()))
        if self._file.tell() + len(record) > self._most_bytes:
            shutil.copyfile(self._path, self._full)
            self._full.chmod(0o600)
            self._file.truncate(0)
            self._file.seek(0)
        self._file.write(_LENGTH.pack(len(record)) + record)
        self._file.flush()


def _texts(file: BinaryIO) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the texts of a file, and leave it where the first that is not whole begins."""
    while True:
        start = file.tell()
        length = file.read(_LENGTH.size)
        record = file.read(*_LENGTH.unpack(length)) if len(length) == _LENGTH.size else b""
        try:
            salt, data = msgspec.msgpack.decode(record, type=tuple[str, bytes])
            text = array("i", data)
        except (msgspec.MsgspecError, ValueError):
            file.seek(start)
            return
        yield salt, text.tolist()
