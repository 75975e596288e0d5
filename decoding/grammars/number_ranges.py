"""Rewrites the bounds of numbers in a JSON schema so that llguidance's expressions for them are exact.

llguidance 1.9 computes with float64 and makes mistakes. Below a bound of several decimals, such as 0.25, it refuses
numbers with fewer, such as 0.2. Above an exclusive whole number, as in 2 < x < 2.5, it accepts the bound. It looks for
multiples with rounding errors, and in one notation. It is exact between 0.2 and 0.25, so a range becomes several.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Decimal
from fractions import Fraction
from typing import Any, TypeGuard

_KEYWORDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_MOST = Decimal(2**63 - 2**10)  # the largest float64 that is an int64
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
_LARGE_STEP = 2**31  # in units of its last decimal: compiling it never ends for some, and fails for nearly all others
_FEW = 3  # multiples in a range that are listed
_TINY = 1e-16
_ULPS = 4  # llguidance reads numbers almost exactly


@dataclass(frozen=True, slots=True)
class _Range:
    """Numbers between two bounds. None: no bound."""

    low: Decimal | None
    high: Decimal | None
    low_open: bool = False
    high_open: bool = False

    @property
    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def narrowed(self, step: Decimal) -> "_Range":
        """The range from its first multiple of a step to its last."""
        low, high = self.low, self.high
        if low is not None:
            low = _multiple(_next_whole(Fraction(low) / Fraction(step), self.low_open), step)
        if high is not None:
            high = _multiple(-_next_whole(-Fraction(high) / Fraction(step), self.high_open), step)
        return _Range(low, high)

    def split(self) -> Iterator["_Range"]:
        """Ranges that llguidance reads exactly, and that are this one together."""
        inner = (point for point in _prefixes(self.low, self.high) if self._holds(point))
        low, low_open = self.low, self.low_open
        for point in sorted({*inner}):
            yield _Range(low, point, low_open)
            low, low_open = point, False
        yield _Range(low, self.high, low_open, self.high_open)

    def _holds(self, point: Decimal) -> bool:
        above = self.low is None or self.low < point or (self.low == point and not self.low_open)
        return above and (self.high is None or point < self.high or (point == self.high and not self.high_open))

    def without_whole_ends(self) -> "_Range":
        """Replace open whole bounds towards zero by the next closed ones."""
        after = self
        if self.low_open and self.low is not None and self.low >= 0 and self.low % 1 == 0:
            after = replace(after, low=_next_number(self.low), low_open=False)
        if self.high_open and self.high is not None and self.high <= 0 and self.high % 1 == 0:
            after = replace(after, high=-_next_number(-self.high), high_open=False)
        return after

    def keywords(self) -> dict[str, Any]:
        bounds: dict[str, Any] = {}
        if self.low is not None:
            bounds["exclusiveMinimum" if self.low_open else "minimum"] = -_at_most(-self.low)
        if self.high is not None:
            bounds["exclusiveMaximum" if self.high_open else "maximum"] = _at_most(self.high)
        return bounds


def exact_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema whose bounds and multiples llguidance reads exactly.

    Raises ValueError if a bound is too large.
    """
    if not any(_is_number(schema.get(keyword)) for keyword in _KEYWORDS):
        return dict(schema)
    types = schema.get("type", _TYPES)
    types = [name for name in (types if isinstance(types, list) else [types]) if isinstance(name, str)]
    whole = "integer" in types and "number" not in types
    bounds, step = _range(schema), _step(schema, whole)
    bounds = bounds.narrowed(step) if step else bounds
    rest = {keyword: value for keyword, value in schema.items() if keyword not in _KEYWORDS}
    if bounds.is_empty or not {"integer", "number"} & {*types}:
        return dict(schema)  # llguidance says why it is empty
    if whole and step == 1:
        return {**rest, **bounds.keywords()}
    ranges = [bounds] if whole else [*bounds.split()]
    parts = [part for each in _written_steps(step) for numbers in ranges if (part := _part(numbers, each)) is not None]
    if len(parts) == 1 and "enum" not in parts[0]:
        return {**rest, **parts[0]}
    kind, others = "integer" if whole else "number", [name for name in types if name not in ("integer", "number")]
    return also(rest, {"anyOf": [{"type": kind, **part} for part in parts] + ([{"type": others}] if others else [])})


def also(schema: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for what both schemas allow; `allOf` keeps its order, which references may count on."""
    if not schema.keys() & other.keys():
        return {**schema, **other}
    parts = schema.get("allOf", [])
    return {**schema, "allOf": [*parts, other]} if isinstance(parts, list) else dict(schema)


def check_literal(value: object) -> None:
    """Raise ValueError if llguidance can't read a number of a `const` or `enum`.

    It can't tell some from their neighbours. Whole ones from -2^63 down end its process.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            check_literal(item)
    elif isinstance(value, int) and int(float(value)) != value:
        raise ValueError(f"{value} is too large to be told from its neighbours; write it as a string")
    elif isinstance(value, int | float) and value <= -(2**63):
        raise ValueError(f"{value} is too far below zero; write it as a string")


def _range(schema: Mapping[str, Any]) -> _Range:
    lows, highs = _bounds(schema, "minimum", "exclusiveMinimum"), _bounds(schema, "maximum", "exclusiveMaximum")
    low, low_open = max(lows, default=(None, False))
    high, high_open = min(((bound, not is_open) for bound, is_open in highs), default=(None, True))
    low, high = _within(low, -_MOST, max), _within(high, _MOST, min)
    if (low is not None and low > _MOST) or (high is not None and high < -_MOST):
        raise ValueError("a bound is too large")
    return _Range(low, high, low_open, not high_open)


def _bounds(schema: Mapping[str, Any], closed: str, exclusive: str) -> list[tuple[Decimal, bool]]:
    """Return the bounds of one side, and whether each is open. Draft 4 has exclusive ones as a switch."""
    bounds = []
    if _is_number(value := schema.get(closed)):
        bounds.append((_decimal(value), schema.get(exclusive) is True))
    if _is_number(value := schema.get(exclusive)):
        bounds.append((_decimal(value), True))
    return bounds


def _within(bound: Decimal | None, limit: Decimal, nearest: Any) -> Decimal | None:
    return None if bound is None else nearest(bound, limit)


def _step(schema: Mapping[str, Any], whole: bool) -> Decimal | None:
    """Return the difference between two numbers in a row. None: there is none."""
    step = schema.get("multipleOf")
    if not _is_number(step) or step == 0:
        return Decimal(1) if whole else None
    exact = abs(_decimal(step))
    return Decimal(Fraction(exact).numerator) if whole else exact


def _written_steps(step: Decimal | None) -> list[Decimal | None]:
    """Return the steps of multiples with ever more decimals. llguidance asks for as many as the step has, or none."""
    if step is None or (decimals := _decimals(step)) == 0:
        return [step]
    count = int(step.scaleb(decimals))
    steps = (math.lcm(count, 10 ** (decimals - some)) for some in range(decimals + 1))
    return [*dict.fromkeys(Decimal(each).scaleb(-decimals) for each in steps)]


def _part(bounds: _Range, step: Decimal | None) -> dict[str, Any] | None:
    """Return the keywords of a range that needs no splitting; None: nothing is in it."""
    if step is None:
        return None if bounds.is_empty else bounds.without_whole_ends().keywords()
    inner = bounds.narrowed(step)
    if inner.is_empty:
        return None
    if inner.low is not None and inner.high is not None and (inner.high - inner.low) / step < _FEW:
        count = int((inner.high - inner.low) / step) + 1
        return {"enum": [_plain(inner.low + index * step) for index in range(count)]}
    if step.scaleb(_decimals(step)) >= _LARGE_STEP:
        raise ValueError(f"multipleOf {step} has too many digits")
    return {**inner.keywords(), "multipleOf": _plain(step)}


def _prefixes(low: Decimal | None, high: Decimal | None) -> Iterator[Decimal]:
    """Yield the numbers with the first decimals of the bounds that point away from zero."""
    for bound, away in ((low, low is not None and low < 0), (high, high is not None and high > 0)):
        if bound is not None and away and (decimals := _decimals(bound)) > 1:
            for count in range(decimals):
                yield bound.quantize(Decimal(1).scaleb(-count), ROUND_DOWN)


def _decimals(number: Decimal) -> int:
    exponent = number.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _next_whole(number: Fraction, is_open: bool) -> int:
    return math.floor(number) + 1 if is_open else math.ceil(number)


def _multiple(count: int, step: Decimal) -> Decimal:
    return count * step


def _next_number(number: Decimal) -> Decimal:
    """Return a bound a few floating-point numbers above a whole number."""
    return _decimal(float(number) + _ULPS * math.ulp(float(number)) if number else _TINY)


def _at_most(bound: Decimal) -> float:
    """Return a bound as a number that float64 holds, or the next one below it."""
    number = float(bound)
    while _decimal(number) > bound or (number.is_integer() and Decimal(number) > bound):
        number = math.nextafter(number, -math.inf)
    return _plain(_decimal(number))


def _plain(number: Decimal) -> float:
    return int(number) if number == number.to_integral_value() else float(number)


def _decimal(number: float) -> Decimal:
    return Decimal(number) if isinstance(number, int) else Decimal(repr(number))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
