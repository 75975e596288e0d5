"""Files that appear whole or not at all. Must not know what is in them."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, then give it its own: a reader never sees a part of it."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
