"""Messages change compatibly, or PROTOCOL is raised. `python -m tests.actors.wire.test_protocol` records a new one."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.wire.messages import PROTOCOL, Message

_RECORD = Path(__file__).with_name("protocol.json")  # the messages when the number was last raised


def _current() -> dict[str, Any]:
    """Return the schema of all messages, and of what they contain, without their descriptions."""
    schemas = msgspec.json.schema(Message)["$defs"]
    return {"protocol": PROTOCOL, "schemas": {name: _bare(schema) for name, schema in schemas.items()}}


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    texts = [name for name in ("title", "description", "default") if not isinstance(schema.get(name), dict)]
    return {name: _bare(part) for name, part in schema.items() if name not in texts}


def _misread(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return what of the old messages new ones lack, have otherwise, or demand in addition."""
    problems = []
    for name, schema in old.items():
        was, is_now = dict(schema), dict(new.get(name, {}))
        fields = was.pop("properties", {})
        now = is_now.pop("properties", {})
        problems += [f"{name}.{field}" for field in fields if fields[field] != now.get(field)]
        problems += [name] if was != is_now else []  # what is required, above all
    return problems


def test_older_and_newer_versions_of_one_protocol_understand_each_other() -> None:
    record, current = json.loads(_RECORD.read_text()), _current()
    assert record["protocol"] == PROTOCOL, f"record it: {__doc__}"
    assert _misread(record["schemas"], current["schemas"]) == [], f"raise PROTOCOL: {__doc__}"


@pytest.mark.parametrize(
    ("fields", "problems"),
    [
        ([("request_id", int)], []),
        ([("request_id", int), ("reason", str, "")], []),
        ([("request_id", int), ("reason", str)], ["Cancel"]),
        ([("id", int)], ["Cancel.request_id", "Cancel"]),
        ([("request_id", str)], ["Cancel.request_id"]),
    ],
    ids=["same", "optional", "required", "renamed", "another type"],
)
def test_what_counts_as_misread(fields: list[Any], problems: list[str]) -> None:
    def schemas(*fields: Any) -> dict[str, Any]:
        struct = msgspec.defstruct("Cancel", fields, tag=True)
        _, definitions = msgspec.json.schema_components([struct])
        return {name: _bare(schema) for name, schema in definitions.items()}

    assert _misread(schemas(("request_id", int)), schemas(*fields)) == problems


if __name__ == "__main__":
    lines = [f'"{name}": {json.dumps(schema)}' for name, schema in sorted(_current()["schemas"].items())]
    body = ",\n".join(lines)
    _RECORD.write_text(f'{{"protocol": {PROTOCOL}, "schemas": {{\n{body}\n}}}}\n')
