"""Loads the stopping criteria that a configuration names, which are the user's own Python functions."""

import importlib

from actors.answer import Criterion
from decoding.errors import ConfigError


def load_criterion(path: str, *, key: str) -> Criterion:
    """The callable at `module:name`. key: where the configuration names it.

    Raises:
        ConfigError: it can't be imported, or is not callable.
    """
    module, _, name = path.partition(":")
    try:
        criterion = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{key}: can't load {path!r}: {type(error).__name__}: {error}") from error
    if not callable(criterion):
        raise ConfigError(f"{key}: {path!r} is a {type(criterion).__name__}, but should be callable")
    rule: Criterion = criterion
    return rule
