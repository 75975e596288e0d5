"""Rewrites a JSON schema so that llguidance's grammar for it allows nothing that the schema forbids.

llguidance 1.9 is too lenient in two cases. It accepts an exclusive whole-number bound if the other bound has the same
integer part, as in 2 < x < 2.5. And it does not tell undeclared keys from each other.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

# Keywords whose values are data, and keywords whose values are schemas by name.
_LITERALS = {"const", "default", "enum", "examples"}
_NAMED = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
_NOT_ENFORCED = {"uniqueItems"}  # no grammar can express it
_TINY = 1e-16
_ULPS = 4  # llguidance reads numbers almost exactly


def strict(schema: Any) -> Any:
    """Return an equivalent schema, `uniqueItems` aside. A value that is no schema is returned as it is.

    Raises:
        ValueError: the schema has no equivalent.
    """
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    _check_size(schema)
    return {
        key: _strict_value(key, value)
        for key, value in _without_exclusive_integers(schema).items()
        if key not in _NOT_ENFORCED
    }


def _strict_value(keyword: str, value: Any) -> Any:
    if keyword in _LITERALS:
        return value
    if keyword in _NAMED and isinstance(value, Mapping):
        return {name: strict(schema) for name, schema in value.items()}
    return strict(value)


def _without_exclusive_integers(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Replace whole exclusive bounds towards zero by the next inclusive ones."""
    rewritten = dict(schema)
    above = _next_integer if _allows_integers_only(schema) else _next_number
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if _is_whole(low) and low >= 0:
        del rewritten["exclusiveMinimum"]
        least = above(low)
        rewritten["minimum"] = max(least, schema["minimum"]) if _is_number(schema.get("minimum")) else least
    if _is_whole(high) and high <= 0:
        del rewritten["exclusiveMaximum"]
        most = -above(-high)
        rewritten["maximum"] = min(most, schema["maximum"]) if _is_number(schema.get("maximum")) else most
    return rewritten


def _allows_integers_only(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type")
    names = [types] if isinstance(types, str) else _names(types)
    return "integer" in names and "number" not in names


def _next_integer(number: float) -> int:
    """Return the next integer that llguidance, which rounds to float64, can tell from a whole number."""
    return int(number) + max(int(math.ulp(number)), 1)


def _next_number(number: float) -> float:
    """Return a bound a few floating-point numbers above a whole number."""
    return number + _ULPS * math.ulp(number) if number else _TINY


def _check_size(schema: Mapping[str, Any]) -> None:
    """Check `minProperties`: undeclared keys may repeat, so an object could have fewer keys than it seems.

    Raises:
        ValueError: it needs more than one undeclared key.
    """
    least = schema.get("minProperties")
    declared = {*_names(schema.get("properties")), *_names(schema.get("required"))}
    if _is_number(least) and least - len(declared) > 1:
        raise ValueError(f"minProperties {least} asks for keys that differ, which is supported for declared ones only")


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list | Mapping) else []


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> TypeGuard[float]:
    return _is_number(value) and math.isfinite(value) and value == int(value)
