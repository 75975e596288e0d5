"""The answer within a text, such as the number that a derivation ends with: what `majority` votes on.

Patterns are RE2's, which match in time linear in the text, so that no text can hold the server up.
"""

import json
from collections.abc import Callable

import re2  # type: ignore[import-untyped]

from decoding.errors import ConfigError

Extract = Callable[[str], str | None]  # None: the text has no answer

MAX_PATTERN = 1000  # characters
_PATTERN_BYTES = 8 * 2**20  # of a compiled one
_MAX_ANSWER = 1000  # characters; what is longer is no answer to vote on
_MAX_OBJECTS = 100  # places where a JSON object is looked for


def whole_text(text: str) -> str | None:
    """All of it."""
    return _tidy(text)


def by_regex(pattern: str, *, key: str) -> Extract:
    """The last match of the pattern: its first group if it has one, else all of it. key: where it is configured.

    Raises:
        ConfigError: RE2 can't compile it, or it is too large.
    """
    options = re2.Options()
    options.max_mem, options.log_errors = _PATTERN_BYTES, False
    if len(pattern) > MAX_PATTERN:
        raise ConfigError(f"{key}: a pattern of {len(pattern)} characters; at most {MAX_PATTERN} are taken")
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ConfigError(f"{key}: {pattern!r} is no regular expression of RE2's: {reason}") from error
    group = min(compiled.groups, 1)

    def extract(text: str) -> str | None:
        last: str | None = None
        for match in compiled.finditer(text):
            last = match.group(group)
        return None if last is None else _tidy(last)

    return extract


def by_json_field(path: str) -> Extract:
    """A field of the last JSON object in the text that has it; `a.b` is the field `b` of the object in `a`."""
    names = path.split(".")

    def extract(text: str) -> str | None:
        for start in reversed([at for at, character in enumerate(text) if character == "{"][-_MAX_OBJECTS:]):
            found, value = _field(text, start, names)
            if found:
                return _tidy(value if isinstance(value, str) else json.dumps(value, sort_keys=True))
        return None

    return extract


def _field(text: str, start: int, names: list[str]) -> tuple[bool, object]:
    """Whether a JSON object begins at `start` and has the field, and the field's value."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return False, None
    for name in names:
        if not isinstance(value, dict) or name not in value:
            return False, None
        value = value[name]
    return True, value


def _tidy(answer: str) -> str | None:
    """Answers that differ in their white space only are the same."""
    words = " ".join(answer.split())
    return words if 0 < len(words) <= _MAX_ANSWER else None
