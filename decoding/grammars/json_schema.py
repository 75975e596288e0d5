"""Rewrites a JSON schema so that llguidance's grammar for it allows nothing that the schema forbids.

llguidance 1.9 knows a declared key in one spelling, so `"\\u0061"` passes for another key than `"a"`. It does not tell
undeclared keys from each other, and its formats and numbers have mistakes of their own.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from decoding.grammars.formats import LONGEST, PATTERNS
from decoding.grammars.number_ranges import also, check_literal, exact_bounds

# Keywords whose values are data, and keywords whose values are schemas by name.
_LITERALS = {"const", "default", "enum", "examples"}
_NAMED = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
_NOT_ENFORCED = {"uniqueItems"}  # no grammar can express it
# JSON may be indented, but endless whitespace must not match. JSON Schema can't express that.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_ONE_SPELLING = 'nrbtf"\\'  # all escapes but \u: every text is written in one way
_CONTROL = re.compile("[\x00-\x1f\x7f]")  # these have several spellings, such as \n and \u000a
_OPTIONS = "x-guidance"


def strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema, `uniqueItems` aside, with llguidance's options.

    Raises:
        ValueError: the schema has no equivalent.
    """
    given = schema.get(_OPTIONS)
    compact = isinstance(given, Mapping) and given.get("whitespace_flexible") is False
    options: dict[str, Any] = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE}
    one_spelling = any(map(_needs_one_spelling, _schemas(schema)))
    if one_spelling:
        options["json_allowed_escapes"] = _ONE_SPELLING
    return {**_rewritten(schema, one_spelling), _OPTIONS: options}


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all within it."""
    if isinstance(schema, list):
        for item in schema:
            yield from _schemas(item)
    elif isinstance(schema, Mapping):
        yield schema
        for keyword, value in schema.items():
            if keyword in _NAMED and isinstance(value, Mapping):
                yield from _schemas(list(value.values()))
            elif keyword not in _LITERALS:
                yield from _schemas(value)


def _rewritten(schema: Any, one_spelling: bool) -> Any:
    if isinstance(schema, list):
        return [_rewritten(item, one_spelling) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    _check(schema)
    inner = {
        keyword: _rewritten_value(keyword, value, one_spelling)
        for keyword, value in schema.items()
        if keyword not in _NOT_ENFORCED
    }
    keys_told_apart = inner if one_spelling else _with_spelled_keys(inner)
    return exact_bounds(_with_exact_format(keys_told_apart))


def _rewritten_value(keyword: str, value: Any, one_spelling: bool) -> Any:
    if keyword in _LITERALS:
        return value
    if keyword in _NAMED and isinstance(value, Mapping):
        return {name: _rewritten(schema, one_spelling) for name, schema in value.items()}
    return _rewritten(value, one_spelling)


def _check(schema: Mapping[str, Any]) -> None:
    """Check literals, and `minProperties`: undeclared keys may repeat, so an object could have fewer than it seems.

    Raises:
        ValueError: it needs more than one undeclared key, or a number that float64 lacks.
    """
    for keyword in ("const", "enum"):
        check_literal(schema.get(keyword))
    least = schema.get("minProperties")
    if isinstance(least, int | float) and not isinstance(least, bool) and least - len({*_declared(schema)}) > 1:
        raise ValueError(f"minProperties {least} asks for keys that differ, which is supported for declared ones only")


def _declared(schema: Mapping[str, Any]) -> list[str]:
    return [*_names(schema.get("properties")), *_names(schema.get("required"))]


def _needs_one_spelling(schema: Mapping[str, Any]) -> bool:
    """Whether undeclared keys could be told from the declared ones only if no text had a second spelling."""
    names = _declared(schema)
    others = schema.get("additionalProperties", True)
    return (
        "patternProperties" in schema
        or any(map(_CONTROL.search, names))
        or bool(names and others not in (True, False, {}))
    )


def _with_spelled_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow further keys by a pattern: llguidance writes these in one way, control characters aside."""
    if not _declared(schema) or schema.get("additionalProperties") is False:
        return schema
    # With "" as the pattern, which means the same, masks take five times as long.
    return {**schema, "patternProperties": {"^": True}, "additionalProperties": False}


def _with_exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("format")
    if not isinstance(name, str) or name not in PATTERNS:
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    limit = {"maxLength": LONGEST[name]} if name in LONGEST else {}
    return also(rest, {"pattern": f"^(?:{PATTERNS[name]})$", **limit})


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list | Mapping) else []
