"""Loads what a configuration names in Python: the user's own functions."""

import importlib
from collections.abc import Callable
from typing import Any

from decoding.errors import ConfigError


def load_callable(path: str, *, key: str) -> Callable[..., Any]:
    """The callable at `module:name`. key: where the configuration names it.

    Raises:
        ConfigError: it can't be imported, or is not callable.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{key}: can't load {path!r}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key}: {path!r} is a {type(found).__name__}, but should be callable")
    loaded: Callable[..., Any] = found
    return loaded
