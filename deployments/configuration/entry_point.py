"""Import the Python functions that a configuration names."""

import importlib
from collections.abc import Callable
from typing import Any

from decoding.errors import ConfigError


def load_callable(path: str, *, key: str) -> Callable[..., Any]:
    """Import the callable at `module:name`. key: the configuration key, for errors.

    Raises:
        ConfigError: it can't be imported, or is not callable.
    """
    module, _, name = path.partition(":")
    try:
        loaded: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing the user's module may raise anything
        raise ConfigError(f"{key}: can't load {path!r}: {type(error).__name__}: {error}") from error
    if not callable(loaded):
        raise ConfigError(f"{key}: {path!r} is a {type(loaded).__name__}, but should be callable")
    function: Callable[..., Any] = loaded
    return function
