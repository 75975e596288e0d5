"""The training text: files and help topics of the standard library, as training and held-out documents."""

import ast
import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, get_args

Kind = Literal["library", "tests", "topics", "chat"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HELD_OUT_ONE_IN = 16
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "encodings", "__pycache__", "data", "lib2to3"}
MAX_FILE_BYTES = 250_000
MAX_MEAN_LINE = 60
MAX_ANSWER_CHARS = 1800


@dataclass(frozen=True, slots=True)
class Document:
    """A file or topic; or a conversation about it, whose text is the answer to a question."""

    source: str
    kind: Kind
    text: str
    question: str | None = None

    @property
    def held_out(self) -> bool:
        """Whether the document is held out. Depends only on the source, so conversations stay with their file."""
        return zlib.crc32(self.source.encode()) % HELD_OUT_ONE_IN == 0


def read_corpus() -> list[Document]:
    """Return every document of this interpreter's standard library, in a fixed order."""
    documents = [
        *_files(),
        *(Document(f"topic:{name}", "topics", text) for name, text in sorted(topics.items())),
    ]
    return documents + [chat for document in documents for chat in _conversations(document)]


def cut(text: str, generator: random.Random) -> list[str]:
    """Cut a text at line starts into pieces of log-uniform length, 300 to 8000 characters."""
    lines = text.splitlines(keepends=True)
    pieces: list[str] = []
    start = 0
    while start < len(lines):
        wanted, size, end = 300 * (8000 / 300) ** generator.random(), 0, start
        while end < len(lines) and size < wanted:
            size += len(lines[end])
            end += 1
        pieces.append("".join(lines[start:end]))
        start = end
    return pieces


def _files() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        if relative.parts[0] == "pydoc_data" or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 200 and len(text) / (text.count("\n") + 1) < MAX_MEAN_LINE:
            tests = {"test", "tests", "idle_test"}.intersection(relative.parts)
            yield Document(relative.as_posix(), "tests" if tests else "library", text)


def _conversations(document: Document) -> Iterator[Document]:
    if document.kind == "topics":
        subject = document.source.removeprefix("topic:")
        yield _chat(document, f"Explain the Python topic {subject!r}.", document.text)
    elif document.kind == "library":
        yield from _function_conversations(document)


def _function_conversations(document: Document) -> Iterator[Document]:
    module = document.source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines = document.text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(document.text)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        answer = ast.get_docstring(node)
        if answer and len(answer) > 60:
            yield _chat(document, f"What does {node.name} in the module {module} do?", answer)
        source = "".join(lines[node.lineno - 1 : node.end_lineno])
        if node.col_offset == 0 and len(source) < MAX_ANSWER_CHARS:
            yield _chat(document, f"Show me the source of {node.name} in the module {module}.", source)


def _chat(document: Document, question: str, answer: str) -> Document:
    return Document(document.source, "chat", answer[:MAX_ANSWER_CHARS].rstrip(), question)
