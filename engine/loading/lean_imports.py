"""Loads models without what they don't need of torch, and tokenizers without torch."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


@contextmanager
def lean_imports() -> Iterator[None]:
    """Let functions that the block imports or calls first go without marks for torch's compiler.

    transformers and torch's arithmetic on the meta device set such marks, which loads all of the compiler, sympy and
    distributed tensors: two seconds of the processor, 150 MB. After the block, whoever asks for them gets them; but for
    transformers there are no distributed tensors in this process, and what torch then compiles may be compiled in more
    parts.
    """
    import torch

    if _COMPILER in sys.modules:
        yield
        return
    marks = ModuleType(_COMPILER)
    vars(marks).update(
        __getattr__=_mark,
        __path__=[str(Path(torch.__file__).with_name("_dynamo"))],  # some of its files are needed, and stand alone
    )
    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    sys.modules[_COMPILER] = marks
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        del sys.modules[_COMPILER]


@contextmanager
def without_torch() -> Iterator[None]:
    """Let transformers find in the block that torch is not installed, in a process that runs no model.

    Its tokenizers and configurations then load without torch and the code of models, which saves up to 3 seconds of the
    processor and 300 MB. transformers holds that for true from then on. All others may import torch after the block.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # that models need torch
    said = os.environ.get(quiet)
    os.environ[quiet] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()
        yield
    finally:
        del sys.modules["torch"]
        os.environ.pop(quiet) if said is None else os.environ.update({quiet: said})


def _mark(name: str) -> Callable[..., Any]:
    """Return a decorator that changes nothing, with arguments or without."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda function=None, *_, **__: function or (lambda decorated: decorated)
