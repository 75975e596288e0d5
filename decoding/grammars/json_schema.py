"""Rewrites a JSON schema so that llguidance's grammar for it allows nothing that the schema forbids.

llguidance 1.9 knows a declared key in one spelling, so `"\u0061"` passes for another key than `"a"`. It does not tell
undeclared keys from each other, and its formats and numbers have mistakes of their own.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from decoding.grammars.number_ranges import also, check_literal, exact_bounds

_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_LAST_32_BITS = f"(?:{_H16}:{_H16}|{_IPV4})"
# Keywords whose values are data, and keywords whose values are schemas by name.
_LITERALS = {"const", "default", "enum", "examples"}
_NAMED = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
_NOT_ENFORCED = {"uniqueItems"}  # no grammar can express it
_MOST_OPTIONAL = 490  # properties of an object; the parser follows at most 2,000 items at once, four for each
# JSON may be indented, but endless whitespace must not match. JSON Schema can't express that.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_ONE_SPELLING = 'nrbtf"\\'  # all escapes but \u: every text is written in one way
_CONTROL = re.compile("[\x00-\x1f\x7f]")  # these have several spellings, such as \n and \u000a
_OPTIONS = "x-guidance"


def _ipv6() -> str:
    """RFC 3986 section 3.2.2: eight groups of 16 bits, the last two also as an IPv4 address; `::` stands for zeros."""
    ends = ["", _H16, *(f"(?:{_H16}:){{{groups - 2}}}{_LAST_32_BITS}" for groups in range(2, 8))]
    shortened = "|".join(
        f"(?:{_H16}(?::{_H16}){{0,{6 - groups}}})?::{end}" if groups < 7 else f"::{end}"
        for groups, end in enumerate(ends)
    )
    return f"(?:(?:{_H16}:){{6}}{_LAST_32_BITS}|{shortened})"


# RFC 3339. Year 0000 is left out, which hardly any calendar has.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_31, _DAY_OF_30, _DAY_OF_28 = "(?:0[1-9]|[12][0-9]|3[01])", "(?:0[1-9]|[12][0-9]|30)", "(?:0[1-9]|1[0-9]|2[0-8])"
_MONTH_AND_DAY = f"(?:0[13578]|1[02])-{_DAY_OF_31}|(?:0[469]|11)-{_DAY_OF_30}|02-{_DAY_OF_28}"
_DATE = f"(?:{_YEAR}-(?:{_MONTH_AND_DAY})|{_LEAP_YEAR}-02-29)"
_HOUR, _SIXTY, _FRACTION = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]", r"(?:\.[0-9]+)?"
_LEAP_SECONDS = "|".join(  # the last second of a day in UTC, in zones of whole hours
    [f"23:59:60{_FRACTION}[zZ]"]
    + [f"{(23 + hours) % 24:02}:59:60{_FRACTION}[+]{hours:02}:00" for hours in range(24)]
    + [f"{(23 - hours) % 24:02}:59:60{_FRACTION}-{hours:02}:00" for hours in range(24)]
)
_TIME = f"(?:{_HOUR}:{_SIXTY}:{_SIXTY}{_FRACTION}(?:[zZ]|[+-]{_HOUR}:{_SIXTY})|{_LEAP_SECONDS})"


def _duration() -> str:
    """RFC 3339 appendix A: units without gaps, or weeks."""
    date = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
    time = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
    return f"P(?:{date}(?:{time})?|{time}|[0-9]+W)"


_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"


def _email() -> str:
    """RFC 5321 section 4.1.2."""
    atom = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
    quoted = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
    return rf"(?:{atom}(?:\.{atom})*|{quoted})@(?:{_HOSTNAME}|\[(?:{_IPV4}|IPv6:{_ipv6()})\])"


def _uri() -> str:
    """RFC 3986 appendix A."""
    plain = r"a-zA-Z0-9._~!$&'()*+,;=\-"  # unreserved and sub-delims
    encoded = f"%{_HEX}{{2}}"
    char = f"(?:[{plain}:@]|{encoded})"
    ip_literal = rf"\[(?:{_ipv6()}|[vV]{_HEX}+\.[{plain}:]+)\]"
    host = f"(?:{ip_literal}|(?:[{plain}]|{encoded})*)"  # a name; IPv4 addresses are names, too
    authority = f"(?:(?:[{plain}:]|{encoded})*@)?{host}(?::[0-9]*)?"
    path = f"(?://{authority}(?:/{char}*)*|/?(?:{char}+(?:/{char}*)*)?)"
    return rf"[a-zA-Z][a-zA-Z0-9+.-]*:{path}(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"


PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _duration(),
    "email": _email(),
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": _uri(),
}
LONGEST = {"hostname": 253}  # characters; RFC 1123
# What JSON Schema defines and we don't. Other names, such as pydantic's `path`, are annotations and restrict nothing.
_REFUSED_FORMATS = {
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
}


def strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema, `uniqueItems` aside, with llguidance's options.

    Raises ValueError if the schema has no equivalent.
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
        if keyword not in _NOT_ENFORCED and not _restricts_nothing(keyword, value)
    }
    keys_told_apart = inner if one_spelling else _with_spelled_keys(inner)
    return exact_bounds(_with_exact_format(keys_told_apart))


def _rewritten_value(keyword: str, value: Any, one_spelling: bool) -> Any:
    if keyword in _LITERALS:
        return value
    if keyword in _NAMED and isinstance(value, Mapping):
        return {name: _rewritten(schema, one_spelling) for name, schema in value.items()}
    return _rewritten(value, one_spelling)


def _restricts_nothing(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return isinstance(value, str) and value not in PATTERNS and value not in _REFUSED_FORMATS
    return keyword == "propertyNames" and value in (True, {}, {"type": "string"})


def _check(schema: Mapping[str, Any]) -> None:
    """Check literals, and `minProperties`: undeclared keys may repeat, so an object could have fewer than it seems.

    Raises ValueError if it needs more than one undeclared key, or a number that float64 lacks, or has more optional
    properties than the engine can follow, which it would find out only in the answer.
    """
    for keyword in ("const", "enum"):
        check_literal(schema.get(keyword))
    optional = {*_names(schema.get("properties"))}.difference(_names(schema.get("required")))
    if len(optional) > _MOST_OPTIONAL:
        raise ValueError(f"{len(optional)} optional properties of an object are more than the {_MOST_OPTIONAL} allowed")
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
