"""Random JSON schemas with short answers: every string, number and array is bounded."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_PATTERNS = ["^[a-z]{2,6}$", "^(foo|ba{1,3}r)$", "^[A-Z][0-9]{3}(-[0-9]{2})?$", "^.{0,4}$", "^\\+?[0-9 ]{3,7}$"]
_FORMATS = ["date", "time", "date-time", "ipv4", "ipv6", "uuid", "hostname", "email"]
_CONSTANTS: list[Any] = ["", "red", "grün", 'a "quoted" \\ word\n', "日本", 0, -7, 3.25, 12345678901, True, False, None]
_NAMES = ["name", "age", "x", "y-1", "a b", "größe", "$id", 'q"', "tags", "next"]


class SchemaGenerator:
    """Makes one schema per seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def schema(self) -> Schema:
        schema = self._any(depth=3)
        if self._definitions:
            schema = {"$defs": self._definitions, **schema}
        return schema

    def _any(self, depth: int) -> Schema:
        scalars: list[Callable[[], Schema]] = [self._string, self._integer, self._number, self._constant, self._enum]
        if depth == 0 or self._random.random() < 0.25:
            return self._random.choice([*scalars, self._simple])()
        nested = [self._object, self._object, self._object, self._array, self._tuple, self._alternatives]
        return self._random.choice([*nested, self._one_of, self._reference, self._list])(depth - 1)

    def _simple(self) -> Schema:
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"]])}

    def _string(self) -> Schema:
        match self._random.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
            case 1:
                return {"type": "string", "format": self._random.choice(_FORMATS), "maxLength": 40}
            case _:
                least = self._random.randrange(4)
                return {"type": "string", "minLength": least, "maxLength": least + self._random.randrange(6)}

    def _integer(self) -> Schema:
        low = self._random.randrange(-2000, 2000)
        high = low + self._random.randrange(20, 3000)
        if self._random.random() < 0.2:
            return {"type": "integer", "minimum": low, "maximum": high, "multipleOf": self._random.choice([2, 5, 7])}
        return self._random.choice(
            [
                {"type": "integer", "minimum": low, "maximum": high},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high},
            ]
        )

    def _number(self) -> Schema:
        low = round(self._random.uniform(-50, 50), self._random.randrange(3))
        bounds = self._random.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        return {"type": "number", bounds[0]: low, bounds[1]: low + self._random.choice([0.5, 3, 1000])}

    def _constant(self) -> Schema:
        return {"const": self._random.choice(_CONSTANTS)}

    def _enum(self) -> Schema:
        return {"enum": self._random.sample(_CONSTANTS, self._random.randrange(1, 6))}

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._random.randrange(5))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": [name for name in names if self._random.random() < 0.6],
            "additionalProperties": False,
        }
        if self._random.random() < 0.1:
            more = {"^k[0-9]{1,2}$": self._integer()}
            schema |= {"patternProperties": more, "required": names, "maxProperties": len(names) + 1}
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._random.randrange(3)
        return {
            "type": "array",
            "items": self._any(depth),
            "minItems": least,
            "maxItems": least + self._random.randrange(3),
        }

    def _tuple(self, depth: int) -> Schema:
        items = [self._any(depth) for _ in range(self._random.randrange(1, 4))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _alternatives(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randrange(2, 4))]}

    def _one_of(self, depth: int) -> Schema:
        return {"oneOf": [self._string(), self._integer(), {"type": "null"}, self._object(depth)]}

    def _reference(self, depth: int) -> Schema:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _list(self, depth: int) -> Schema:
        """Return the schema of a linked list, which refers to itself."""
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {
            "type": "object",
            "properties": {
                "value": self._integer(),
                "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}
