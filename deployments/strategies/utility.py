"""How good a candidate would be if a reference were right: what minimum Bayes risk maximises in expectation."""

import importlib
from collections.abc import Callable

from decoding.errors import ConfigError

Utility = Callable[[str, str], float]  # of a candidate, given a reference; the greater, the better

DEFAULT_UTILITY = f"{__name__}:chrf"


def chrf(candidate: str, reference: str) -> float:
    """Character n-gram F-score, 0 to 1: chrF2 (Popović 2015, "chrF", WMT), as sacrebleu has it (arXiv 1804.08771)."""
    from sacrebleu import sentence_chrf  # takes a while to import, and few need it

    return float(sentence_chrf(candidate, [reference]).score) / 100


def load_utility(path: str, *, key: str) -> Utility:
    """The callable at `module:name`. key: where the configuration names it.

    Raises:
        ConfigError: it can't be imported, or is not callable.
    """
    module, _, name = path.partition(":")
    try:
        utility = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{key}: can't load {path!r}: {type(error).__name__}: {error}") from error
    if not callable(utility):
        raise ConfigError(f"{key}: {path!r} is a {type(utility).__name__}, but should be callable")
    loaded: Utility = utility
    return loaded
