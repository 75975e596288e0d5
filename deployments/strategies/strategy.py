"""The strategy that chooses among whole answers, as it is configured.

Patterns are RE2's: matching time is linear in the text, so no text can block the server.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import re2  # type: ignore[import-untyped]

from decoding.errors import ConfigError
from deployments.configuration.endpoint import StrategyConfig
from deployments.configuration.values import load_callable
from deployments.strategies.ranking import Utility, chrf

Extract = Callable[[str], str | None]  # None: the text has no answer

_MAX_PATTERN = 1000  # characters
_PATTERN_BYTES = 8 * 2**20  # of a compiled pattern
_MAX_ANSWER = 1000  # characters; longer texts have no vote
_MAX_OBJECTS = 100  # opening braces to try


def whole_text(text: str) -> str | None:
    """Return the text with white space normalised; None if nothing is left or it is too long to be an answer."""
    words = " ".join(text.split())
    return words if 0 < len(words) <= _MAX_ANSWER else None


def by_regex(pattern: str, *, key: str) -> Extract:
    """Extract the last match of the pattern, or its first group if it has one. key: for errors.

    Raises:
        ConfigError: RE2 can't compile it, or it is too large.
    """
    options = re2.Options()
    options.max_mem, options.log_errors = _PATTERN_BYTES, False
    if len(pattern) > _MAX_PATTERN:
        raise ConfigError(f"{key}: has {len(pattern)} characters; at most {_MAX_PATTERN} are allowed")
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ConfigError(f"{key}: {pattern!r} is not a regular expression of RE2: {reason}") from error
    group = min(compiled.groups, 1)

    def extract(text: str) -> str | None:
        last: str | None = None
        for match in compiled.finditer(text):
            last = match.group(group)
        return None if last is None else whole_text(last)

    return extract


def by_json_field(path: str) -> Extract:
    """Extract a field of the last JSON object that has it; `a.b` is the field `b` of the object in `a`."""
    names = path.split(".")

    def extract(text: str) -> str | None:
        starts = [index for index, character in enumerate(text) if character == "{"]
        for start in reversed(starts[-_MAX_OBJECTS:]):
            exists, value = _field(text, start, names)
            if exists:
                return whole_text(value if isinstance(value, str) else json.dumps(value, sort_keys=True))
        return None

    return extract


def _field(text: str, start: int, names: list[str]) -> tuple[bool, object]:
    """Return whether a JSON object at `start` has the field, and the field's value."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return False, None
    for name in names:
        if not isinstance(value, dict) or name not in value:
            return False, None
        value = value[name]
    return True, value


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """The strategy of one endpoint.

    rerank: the answer that the members, or the judge, find most likely per token. majority: the most frequent extracted
    answer; with one member, self-consistency (Wang et al., arXiv 2203.11171). mbr: the answer closest to all others.
    best_of: the answer that its own member finds most likely per token.
    """

    kind: Literal["rerank", "majority", "mbr", "best_of"]
    candidates: int = 4  # per member
    judge: str | None = None  # rerank: the member that scores all; None: every member does
    extract: Extract = whole_text  # majority
    utility: Utility = chrf  # mbr


def load_strategy(config: StrategyConfig, *, key: str) -> StrategyOptions:
    """Build the options of a configured strategy. key: its configuration key, for errors.

    Raises:
        ConfigError: the pattern can't be compiled, or the utility can't be loaded.
    """
    if config.kind == "mbr" and config.utility is None and find_spec("sacrebleu") is None:
        raise ConfigError(f"{key}.utility: chrF needs sacrebleu: pip install 'consort[mbr]'; or name another function")
    extract: Extract = whole_text if config.json_field is None else by_json_field(config.json_field)
    if config.regex is not None:
        extract = by_regex(config.regex, key=f"{key}.regex")
    return StrategyOptions(
        kind=config.kind,
        candidates=config.candidates,
        judge=config.judge,
        extract=extract,
        utility=chrf if config.utility is None else load_callable(config.utility, key=f"{key}.utility"),
    )
