"""Extract the answer from a text, such as the number at the end of a derivation. `majority` votes on it.

Patterns are RE2's: matching time is linear in the text, so no text can block the server.
"""

import json
from collections.abc import Callable

import re2  # type: ignore[import-untyped]

from decoding.errors import ConfigError

Extract = Callable[[str], str | None]  # None: the text has no answer

MAX_PATTERN = 1000  # characters
_PATTERN_BYTES = 8 * 2**20  # of a compiled pattern
_MAX_ANSWER = 1000  # characters; longer texts have no vote
_MAX_OBJECTS = 100  # opening braces to try


def whole_text(text: str) -> str | None:
    """Return the text itself, with white space normalised."""
    return _normalise(text)


def by_regex(pattern: str, *, key: str) -> Extract:
    """Extract the last match of the pattern, or its first group if it has one. key: for errors.

    Raises:
        ConfigError: RE2 can't compile it, or it is too large.
    """
    options = re2.Options()
    options.max_mem, options.log_errors = _PATTERN_BYTES, False
    if len(pattern) > MAX_PATTERN:
        raise ConfigError(f"{key}: has {len(pattern)} characters; at most {MAX_PATTERN} are allowed")
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
        return None if last is None else _normalise(last)

    return extract


def by_json_field(path: str) -> Extract:
    """Extract a field of the last JSON object that has it; `a.b` is the field `b` of the object in `a`."""
    names = path.split(".")

    def extract(text: str) -> str | None:
        starts = [index for index, character in enumerate(text) if character == "{"]
        for start in reversed(starts[-_MAX_OBJECTS:]):
            exists, value = _field(text, start, names)
            if exists:
                return _normalise(value if isinstance(value, str) else json.dumps(value, sort_keys=True))
        return None

    return extract


def _field(text: str, start: int, names: list[str]) -> tuple[bool, object]:
    """Return whether a JSON object starts at `start` and has the field, and the field's value."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return False, None
    for name in names:
        if not isinstance(value, dict) or name not in value:
            return False, None
        value = value[name]
    return True, value


def _normalise(answer: str) -> str | None:
    """Normalise white space; None if nothing is left or the answer is too long."""
    words = " ".join(answer.split())
    return words if 0 < len(words) <= _MAX_ANSWER else None
